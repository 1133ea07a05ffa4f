"""Optax transformations for a hand-written training step inside `jax.shard_map`."""

from ._compress import CompressState as CompressState
from ._compress import compress as compress
from ._pipelined import PipelinedState as PipelinedState
from ._pipelined import pipelined as pipelined
from ._pipelined_mean import pipelined_mean as pipelined_mean
from ._predicted_params import predicted_params as predicted_params
from ._specs import state_specs as state_specs
