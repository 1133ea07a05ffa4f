"""Hides the gradient exchange of data-parallel JAX training behind compute.

`make_train_step` makes a step in which the gradient all-reduce of the previous step
runs while this step computes. `pipelined` and `predicted_params` do the same in a
hand-written training loop. `pipejax.checkpoint` and `pipejax.flax` need optional
dependencies, and are imported by name.
"""

from . import codecs as codecs
from . import collectives as collectives
from . import launch as launch
from . import overlap as overlap
from . import problems as problems
from . import stability as stability
from . import timing as timing
from . import transforms as transforms
from ._core.executors import compiler_options as compiler_options
from ._core.message import InFlight as InFlight
from ._core.replicas import replica_digest as replica_digest
from ._internal.mesh import data_mesh as data_mesh
from .train_step import Aux as Aux
from .train_step import LocalState as LocalState
from .train_step import LocalTrainStep as LocalTrainStep
from .train_step import PipelineState as PipelineState
from .train_step import RoundInfo as RoundInfo
from .train_step import StepInfo as StepInfo
from .train_step import TrainStep as TrainStep
from .train_step import make_local_step as make_local_step
from .train_step import make_train_step as make_train_step
from .train_step import mean_info as mean_info
from .transforms import PipelinedState as PipelinedState
from .transforms import pipelined as pipelined
from .transforms import pipelined_mean as pipelined_mean
from .transforms import predicted_params as predicted_params
from .transforms import state_specs as state_specs

__version__ = "0.1.0"
