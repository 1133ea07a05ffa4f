"""The train step: its state, its recursion, the update and the drain."""

from ._check_optimizer import check_kept_form as check_kept_form
from ._check_optimizer import check_optimizer as check_optimizer
from ._check_optimizer import opt_state_difference as opt_state_difference
from ._check_settings import check_all_reduce as check_all_reduce
from ._check_settings import check_axis_name as check_axis_name
from ._check_settings import check_feedback as check_feedback
from ._check_settings import check_flag as check_flag
from ._check_settings import check_width as check_width
from ._info import StepInfo as StepInfo
from ._info import mean_info as mean_info
from ._make import make_train_step as make_train_step
from ._shardings import in_flight_shardings as in_flight_shardings
from ._shardings import state_shardings as state_shardings
from ._state import Aux as Aux
from ._state import PipelineState as PipelineState
from ._state import SharedState as SharedState
from ._step import TrainStep as TrainStep
