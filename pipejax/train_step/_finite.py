"""Checks before the first step that model state is finite where the loss changes it.

An infinity or NaN there would stay for the whole run.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from pipejax._core.executors import StepConfig
from pipejax._core.step import (
    Inputs,
    PipelineState,
    averaged,
    first_part,
    inputs_over,
    typed_loss,
)
from pipejax._internal.types import Leaf, ModelState


def check_model_state(
    config: StepConfig, state: PipelineState, inputs: Inputs | None
) -> None:
    """Raises a `ValueError` for a leaf that is not finite and that the loss changes.

    The model state obeys `s[t] = s[t-1] + d[t-K]`, where d is the mean change over
    devices. If s is not finite, d is infinite or NaN too, and every update would be
    skipped. Leaves that the loss returns as they are (masks, constants) may hold any
    value. A batch or its shapes shows which these are. Traced states are not checked.
    """
    bad = _non_finite(state.model_state)
    if not any(bad):
        return
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(state.model_state)]
    names = [f"model_state{jax.tree_util.keystr(path)}" for path in paths]
    if inputs is None:
        raise ValueError(
            "`batch` must be given to `train.init` with a `model_state` that is not"
            " finite, to show whether `loss_fn` returns it unchanged; got None, and"
            f" `{names[bad.index(True)]}` with an infinity or NaN. Call"
            " `train.init(params, model_state=..., batch=batch)`."
        )
    unchanged = _unchanged(config, state, inputs)
    for name, infinite, same in zip(names, bad, unchanged, strict=True):
        if infinite and not same:
            raise ValueError(
                "`model_state` must be finite where `loss_fn` changes it, got"
                f" `{name}` with an infinity or NaN:"
                " its change would never be finite, and every update skipped. Start it"
                " at a number of the size of what it will hold, such as that of one"
                " batch."
            )


def _non_finite(model_state: ModelState) -> list[bool]:
    """Returns for each leaf whether it holds an infinity or NaN; false for tracers."""

    def bad(leaf: Leaf) -> bool:
        if isinstance(leaf, jax.core.Tracer) or not averaged(leaf):
            return False
        if leaf.sharding.is_fully_replicated:
            return not np.isfinite(leaf.addressable_data(0)).all()
        return not jax.jit(lambda x: jnp.isfinite(x).all())(leaf)

    return [bad(leaf) for leaf in jax.tree.leaves(model_state)]


def _unchanged(
    config: StepConfig, state: PipelineState, inputs: Inputs
) -> tuple[bool, ...]:
    loss_fn = typed_loss(config.step.settings, state.shards, inputs.specs)
    over_data = inputs_over(config.axis_name)
    specs = P(), over_data.batch, P(), P(), over_data.shared

    def returned(params: optax.Params, batch: Any, *rest: Any) -> Any:
        part = first_part(batch, config.step.settings.microbatches)
        # As in a step. Without derivatives, `jax.checkpoint` returns other arrays.
        return jax.vjp(lambda w: loss_fn(w, part, *rest), params, has_aux=True)[2]

    local = config.on_mesh(returned, specs, P())
    args = state.params, inputs.batch, state.model_state, state.rng, inputs.shared
    return jax.eval_shape(local, *args).unchanged
