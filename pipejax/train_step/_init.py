"""The state before the first step."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pipejax import buckets
from pipejax.executors import Setting
from pipejax.pipeline import PipelinedMeanState, empty_pipeline

from ._check_input import (
    check_batch,
    check_keywords,
    check_optimizer,
    check_params,
    check_replicated,
)
from ._gradient import empty_message
from ._halves import Halves
from ._state import Carry, Message


def initial(
    halves: Halves,
    setting: Setting,
    params: Any,
    model_state: Any,
    rng: Any,
    opt_state: Any,
    batch: Any,
    *,
    feeds_back: bool,
) -> tuple[Carry, PipelinedMeanState]:
    """Lays out the replicated state, and a pipeline with nothing in flight.

    Placing arrays on several processes is a collective: no other may be under way.

    Raises:
      ValueError: for what `train.init` must not be given.
    """
    check_params(params)
    check_keywords(halves.loss_fn, model_state=model_state, rng=rng)
    given = {"params": params, "model_state": model_state, "opt_state": opt_state}
    for name, tree in given.items():
        check_replicated(name, tree)
    check_optimizer(
        jax.eval_shape(halves.tx.init, params) if opt_state is None else opt_state,
        plain_delay=setting.width > 1 and not halves.weight_prediction,
    )
    params, model_state, rng, opt_state = args = jax.device_put(
        (params, model_state, rng, opt_state), NamedSharding(setting.mesh, P())
    )
    message = _message_shape(halves, setting, params, model_state, rng, batch)
    sizes = buckets.sizes(message, halves.reduce_dtype)

    def make(params: Any, model_state: Any, rng: Any, opt_state: Any) -> Any:
        carry = Carry(
            params=params,
            opt_state=halves.tx.init(params) if opt_state is None else opt_state,
            model_state=model_state,
            rng=rng,
            skipped=jnp.zeros((), jnp.int32),
            step=jnp.zeros((), jnp.int32),
        )
        return carry, empty_pipeline(sizes, setting.width, {}, feeds_back=feeds_back)

    specs = (P(), P(setting.axis_name))
    return jax.jit(setting.on_mesh(make, P(), specs))(*args)


def _message_shape(
    halves: Halves,
    setting: Setting,
    params: Any,
    model_state: Any,
    rng: Any,
    batch: Any,
) -> Message:
    """Returns the shapes of one device's message."""
    if batch is None:
        return jax.eval_shape(empty_message, params, model_state)
    check_batch(batch, setting.devices, halves.microbatches)

    def local(params: Any, model_state: Any, rng: Any, batch: Any) -> Message:
        return halves.message(params, model_state, rng, batch)[0]

    local = setting.on_mesh(local, (P(), P(), P(), P(setting.axis_name)), P())
    return jax.eval_shape(local, params, model_state, rng, batch)
