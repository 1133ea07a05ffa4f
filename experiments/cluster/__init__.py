"""Emulates a cluster on one machine: hosts, links of a chosen rate, and real TCP.

Start a program on every host with `python -m experiments.cluster --hosts 4 --rate
500mbit -- python -m my.program`. The program calls `member.join()` to join the hosts.
"""

from ._ask import ask as ask
from ._network import INTERFACE as INTERFACE
from ._network import Network as Network
from ._network import bits_per_second as bits_per_second
from ._network import bucket as bucket
from ._network import shown_rate as shown_rate
from ._start import reason_why_not as reason_why_not
from ._start import start as start
