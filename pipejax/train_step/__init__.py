"""What a step is: its state, the recursion, the update, and the way out."""

from ._make import make_train_step as make_train_step
from ._pipelined_mean import pipelined_mean as pipelined_mean
from ._pipelined_mean import state_specs as state_specs
from ._state import Aux as Aux
from ._state import PipelineState as PipelineState
from ._state import StepInfo as StepInfo
from ._step import TrainStep as TrainStep
