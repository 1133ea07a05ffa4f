"""Executors, which run the compute, the exchange and the update of a train step.

- `Fused` runs a step as one program, in which the collectives overlap with compute.
- `Host` runs compute and update as two programs, and the exchange as a third one on a
  communication thread.
- `Auto` begins as `Host`, and changes to `Fused` if the loss or the optimizer has a
  collective between processes.

`choose` returns the executor for a given name and mesh.
"""

from ._choose import choose as choose
from ._config import StepConfig as StepConfig
from ._executor import Executor as Executor
from ._fused import Fused as Fused
from ._options import compiler_options as compiler_options
from ._reduce import make_reduce as make_reduce
from ._reduce import make_update as make_update
from ._thread import join as join
