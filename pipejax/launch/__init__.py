"""Joins the processes of a job, and ends the job when one of them fails or stalls.

The command `pipejax launch` starts the processes, `initialize` joins them, and
`Watchdog` watches them.
"""

from ._detect import detect as detect
from ._initialize import initialize as initialize
from ._monitor import FAULT as FAULT
from ._place import Place as Place
from ._roll_call import RollCallError as RollCallError
from ._watchdog import Watchdog as Watchdog
