"""Checks of arguments that several public functions take."""

from ._arrays import check_arrays as check_arrays
from ._arrays import check_keys as check_keys
from ._arrays import fault_of as fault_of
from ._arrays import no_array as no_array
from ._input import check_attached as check_attached
from ._input import check_batch as check_batch
from ._input import check_keywords as check_keywords
from ._input import check_params as check_params
from ._input import common_length as common_length
from ._input import is_array as is_array
from ._input import named_shapes as named_shapes
from ._optimizer import check_kept_form as check_kept_form
from ._optimizer import check_opt_state as check_opt_state
from ._optimizer import check_optimizer as check_optimizer
from ._optimizer import opt_state_difference as opt_state_difference
from ._settings import check_all_reduce as check_all_reduce
from ._settings import check_axis_name as check_axis_name
from ._settings import check_count as check_count
from ._settings import check_executor as check_executor
from ._settings import check_flag as check_flag
from ._settings import check_floating as check_floating
from ._settings import check_mesh as check_mesh
from ._settings import check_prediction as check_prediction
from ._settings import check_sharded_optimizer as check_sharded_optimizer
from ._settings import check_tx as check_tx
from ._settings import check_width as check_width
