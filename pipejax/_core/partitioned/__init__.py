"""Functions of whole arrays, run by devices that have only pieces of them.

With a sharded optimizer, every device keeps a piece of each parameter and of each array
of the optimizer's state: its partition. Optax optimizers are functions of whole arrays.
`on_partitions` turns their update into a program for pieces, and refuses updates that
need more.
"""

from ._plan import on_partitions as on_partitions
from ._program import Program as Program
from ._rules import Devices as Devices
from ._rules import NotElementwiseError as NotElementwiseError
from ._rules import Split as Split
from ._rules import acts_elementwise as acts_elementwise
from ._rules import whole as whole
from ._stages import stages_of as stages_of
