"""Optax transformations that correct for the delay of a pipeline.

Both are made for a plain delay: for a hand-written training loop with
`pj.pipelined_mean`, or for a train step with `weight_prediction=False`. Do not combine
them with the weight prediction of `pj.make_train_step`, which is on by default: both
compensate for the same delay.

- `delay_robust` replaces the momentum of an optimizer by one that stays stable under a
  delay. Put it before or after the optimizer.
- `extrapolate_updates` predicts parameters from the last update. Put it last in a
  chain.
"""

from ._delay_robust import DelayRobustState as DelayRobustState
from ._delay_robust import delay_robust as delay_robust
from ._extrapolate import ExtrapolateUpdatesState as ExtrapolateUpdatesState
from ._extrapolate import extrapolate_updates as extrapolate_updates
from ._extrapolate import unextrapolated as unextrapolated
