"""What undoes a delay, as Optax transformations.

For a plain delay: that of `pipelined_mean` in a loop of one's own, or of a train step
with `weight_prediction=False`. Beside the weight prediction that is a train step's
default they would correct what is corrected.

- `average_gradients`, `scale_by_staleness`, `delay_compensation`: of the gradient or
  the update as it comes, put before or after an optimizer
- `extrapolate_updates`: weight prediction, or update-level error feedback, put last
- `delay_robust`: an optimizer's momentum made one that a delay leaves stable
"""

from ._average import AverageGradientsState as AverageGradientsState
from ._average import average_gradients as average_gradients
from ._compensate import DelayCompensationState as DelayCompensationState
from ._compensate import delay_compensation as delay_compensation
from ._delay_robust import DelayRobustState as DelayRobustState
from ._delay_robust import delay_robust as delay_robust
from ._extrapolate import ExtrapolateUpdatesState as ExtrapolateUpdatesState
from ._extrapolate import extrapolate_updates as extrapolate_updates
from ._extrapolate import unextrapolated as unextrapolated
from ._staleness import scale_by_staleness as scale_by_staleness
