"""What undoes a delay, as Optax transformations.

- `average_gradients`, `scale_by_staleness`, `delay_compensation`: of the gradient or
  the update as it comes, put before or after an optimizer
- `extrapolate_updates`: weight prediction, or update-level error feedback, put last
"""

from ._average import AverageGradientsState as AverageGradientsState
from ._average import average_gradients as average_gradients
from ._compensate import DelayCompensationState as DelayCompensationState
from ._compensate import delay_compensation as delay_compensation
from ._extrapolate import ExtrapolateUpdatesState as ExtrapolateUpdatesState
from ._extrapolate import extrapolate_updates as extrapolate_updates
from ._extrapolate import unextrapolated as unextrapolated
from ._staleness import scale_by_staleness as scale_by_staleness
