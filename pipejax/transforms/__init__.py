"""Optax transformations for training with a delay.

`pipelined`, `pipelined_mean`, `predicted_params` and `compress` are for a hand-written
training step inside `jax.shard_map`.

`delay_robust` and `extrapolate_updates` are for a plain delay, in such a step or in a
train step with `weight_prediction=False`. Do not combine them with weight prediction:
both compensate for the same delay.
"""

from pipejax._core.message import CompressState as CompressState

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
