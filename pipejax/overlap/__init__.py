"""Tools that show whether compute hides the communication of a program.

- `inspect` reads the schedule of a compiled program. It reports which compute XLA runs
  while each collective is in progress, and needs no accelerator.
- `timeline` draws the schedules that `inspect` has read.
- `collective_groups` lists the devices that exchange data in each collective.
- `difference_inside` compares what a sharded model sends inside groups of devices with
  what its synchronous twin sends there.
- `topology` returns devices of an absent accelerator, to compile programs for.
- `least_delay` chooses the gradients that must be delayed to hide an exchange.
- `measure` times compute, communication and the whole step on the devices at hand.
"""

from pipejax._internal.hlo import Collective as Collective
from pipejax._internal.hlo import CollectiveGroups as CollectiveGroups
from pipejax._internal.hlo import Memory as Memory
from pipejax._internal.hlo import Report as Report
from pipejax._internal.hlo import amount as amount
from pipejax._internal.hlo import collective_groups as collective_groups
from pipejax.collectives import NoCommunication as NoCommunication

from ._inspect import inspect as inspect
from ._least_delay import least_delay as least_delay
from ._measure import Measurement as Measurement
from ._measure import measure as measure
from ._timeline import timeline as timeline
from ._topology import topology as topology
from ._twin import Inside as Inside
from ._twin import difference_inside as difference_inside
