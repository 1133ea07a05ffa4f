"""A step: what one device does, as pure functions over one state.

`Step` says what these functions are. `replicated_step` and `zero1_step` make them.
"""

from ._check_state import check_empty as check_empty
from ._check_state import check_in_flight as check_in_flight
from ._check_state import check_kind as check_kind
from ._check_state import check_not_donated as check_not_donated
from ._check_state import check_optimizer_of as check_optimizer_of
from ._check_state import check_pending as check_pending
from ._check_state import check_state as check_state
from ._check_state import is_deleted as is_deleted
from ._delayed import delays as delays
from ._delayed import parted as parted
from ._delayed import without as without
from ._frozen import moves as moves
from ._gradient import empty_message as empty_message
from ._gradient import first_part as first_part
from ._info import StepInfo as StepInfo
from ._info import info_of as info_of
from ._info import mean_info as mean_info
from ._inputs import Inputs as Inputs
from ._inputs import InputSpecs as InputSpecs
from ._inputs import inputs_over as inputs_over
from ._loss import Loss as Loss
from ._model_state import averaged as averaged
from ._prediction import KindOf as KindOf
from ._replicated import replicated_step as replicated_step
from ._state import Aux as Aux
from ._state import Common as Common
from ._state import PipelineState as PipelineState
from ._state import Trainable as Trainable
from ._state import common_of as common_of
from ._state import completed as completed
from ._state import data_specs as data_specs
from ._state import inner_state_specs as inner_state_specs
from ._state import state_data_specs as state_data_specs
from ._state import state_of as state_of
from ._state import without_trainable as without_trainable
from ._step import Computed as Computed
from ._step import Delayed as Delayed
from ._step import Rule as Rule
from ._step import Settings as Settings
from ._step import Step as Step
from ._typed_loss import typed_loss as typed_loss
from ._update import apply as apply
from ._update import moving as moving
from ._update import updated as updated
from ._within_host import device_axis as device_axis
from ._zero1 import zero1_step as zero1_step
