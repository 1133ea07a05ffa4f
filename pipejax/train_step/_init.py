"""Makes the state before the first step."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from pipejax.executors import StepConfig
from pipejax.message import InFlight, Message, empty

from ._check_input import (
    check_attached,
    check_batch,
    check_keywords,
    check_params,
    check_replicated,
)
from ._check_optimizer import check_opt_state, check_optimizer
from ._gradient import empty_message
from ._local_step import LocalStep
from ._replicate import replicated
from ._state import ReplicatedState


def initial(
    local_step: LocalStep,
    config: StepConfig,
    params: Any,
    model_state: Any,
    rng: Any,
    opt_state: Any,
    batch: Any,
    *,
    feeds_back: bool,
) -> tuple[ReplicatedState, InFlight]:
    """Lays out the replicated state, and a pipeline with nothing in flight.

    On several processes, placing the arrays is a collective, so no other collective may
    be under way.

    Returns:
      The replicated state, and the empty pipeline of all devices without codec states.

    Raises:
      ValueError: If `train.init` must not be given one of the arguments.
    """
    check_params(params)
    check_attached(config.mesh, params)
    check_keywords(local_step.loss_fn, model_state=model_state, rng=rng)
    given = {
        "params": params,
        "model_state": model_state,
        "rng": rng,
        "opt_state": opt_state,
    }
    for name, tree in given.items():
        check_replicated(name, tree)
    check_optimizer(
        jax.eval_shape(local_step.tx.init, params) if opt_state is None else opt_state,
        plain_delay=config.width > 1 and not local_step.weight_prediction,
    )
    if opt_state is not None:
        check_opt_state(local_step.tx, params, opt_state)
    placed = replicated(given, config.mesh)
    params, model_state, rng, opt_state = args = [placed[name] for name in given]
    like = _message_form(local_step, config, params, model_state, rng, batch)

    def make(params: Any, model_state: Any, rng: Any, opt_state: Any) -> Any:
        state = ReplicatedState(
            params=params,
            opt_state=local_step.tx.init(params) if opt_state is None else opt_state,
            model_state=model_state,
            rng=rng,
            skipped=jnp.zeros((), jnp.int32),
            step=jnp.zeros((), jnp.int32),
        )
        return state, empty(like, config.width, {}, feeds_back=feeds_back)

    specs = (P(), P(config.axis_name))
    return jax.jit(config.on_mesh(make, P(), specs))(*args)


def _message_form(
    local_step: LocalStep,
    config: StepConfig,
    params: Any,
    model_state: Any,
    rng: Any,
    batch: Any,
) -> Message:
    """Returns the shapes of one device's message.

    Without a `batch`, the loss is taken to be the only passenger.
    """
    if batch is None:
        dtype = local_step.reduce_dtype
        return jax.eval_shape(lambda: empty_message(params, model_state, dtype))
    check_batch(batch, config.devices, local_step.microbatches)

    def local(params: Any, model_state: Any, rng: Any, batch: Any) -> Message:
        return local_step.message(params, model_state, rng, batch)[0]

    local = config.on_mesh(local, (P(), P(), P(), P(config.axis_name)), P())
    return jax.eval_shape(local, params, model_state, rng, batch)
