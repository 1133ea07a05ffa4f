"""Optax transformations that correct for the delay of a pipeline.

All of them are made for a plain delay: for a hand-written training loop with
`pj.pipelined_mean`, or for a train step with `weight_prediction=False`. Do not combine
them with the weight prediction of `pj.make_train_step`, which is on by default: both
compensate for the same delay.

- `delay_robust` replaces the momentum of an optimizer by one that stays stable under a
  delay. Put it before or after the optimizer.
- `extrapolate_updates` predicts parameters from the last update. Put it last in a
  chain.
- `delay_compensation` moves a late gradient to the current parameters by a Taylor
  step. Put it before the optimizer.
- `average_gradients` averages the last gradients. Put it before the optimizer.
- `scale_by_staleness` divides updates by the width. Put it after the optimizer.
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
