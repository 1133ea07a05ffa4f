"""The train step: its state, its recursion, the update and the drain."""

from ._info import StepInfo as StepInfo
from ._info import mean_info as mean_info
from ._make import make_train_step as make_train_step
from ._shardings import in_flight_shardings as in_flight_shardings
from ._shardings import state_shardings as state_shardings
from ._state import Aux as Aux
from ._state import PipelineState as PipelineState
from ._state import SharedState as SharedState
from ._step import TrainStep as TrainStep
