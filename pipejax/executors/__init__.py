"""How a step runs: as one program, or with a communication thread beside it."""

from ._choose import choose as choose
from ._config import StepConfig as StepConfig
from ._executor import Executor as Executor
from ._fused import Fused as Fused
from ._options import compiler_options as compiler_options
from ._own_collectives import collective_axes as collective_axes
from ._own_collectives import own_transfers as own_transfers
from ._reduce import make_reduce as make_reduce
