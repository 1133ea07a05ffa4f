"""Optax transformations for training with a delay.

For a hand-written training step inside `jax.shard_map`:

- `pipelined` wraps an optimizer, and `pipelined_mean` stands at the beginning of a
  chain: both average gradients over devices, some steps late.
- `predicted_params` predicts the parameters at which to take a gradient.
- `compress` shows what a codec does to training.

For a plain delay, in such a step or in a train step with `weight_prediction=False`. Do
not combine these with weight prediction: both compensate for the same delay.

- `delay_robust` replaces the momentum of an optimizer by one that stays stable under a
  delay. Put it before or after the optimizer.
- `extrapolate_updates` predicts parameters from the last update. Put it last in a
  chain.
"""

from ._compress import CompressState as CompressState
from ._compress import compress as compress
from ._delay_robust import DelayRobustState as DelayRobustState
from ._delay_robust import delay_robust as delay_robust
from ._extrapolate import ExtrapolateUpdatesState as ExtrapolateUpdatesState
from ._extrapolate import extrapolate_updates as extrapolate_updates
from ._extrapolate import unextrapolated as unextrapolated
from ._pipelined import PipelinedState as PipelinedState
from ._pipelined import pipelined as pipelined
from ._pipelined_mean import pipelined_mean as pipelined_mean
from ._predicted_params import predicted_params as predicted_params
from ._specs import state_specs as state_specs
