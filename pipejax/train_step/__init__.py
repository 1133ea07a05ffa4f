"""The train step: its state, its recursion, the update and the drain."""

from pipejax._core.rounds import LocalState as LocalState
from pipejax._core.rounds import RoundInfo as RoundInfo
from pipejax._core.step import Aux as Aux
from pipejax._core.step import PipelineState as PipelineState
from pipejax._core.step import StepInfo as StepInfo
from pipejax._core.step import mean_info as mean_info

from ._local_step import LocalTrainStep as LocalTrainStep
from ._make import make_train_step as make_train_step
from ._make_local_step import make_local_step as make_local_step
from ._step import TrainStep as TrainStep
