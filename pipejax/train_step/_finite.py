"""Checks in the first step that the model state is finite where the loss changes it.

An infinity or NaN there would stay for the whole run.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from pipejax._core.executors import StepConfig
from pipejax._core.step import PipelineState, averaged, full_form
from pipejax._internal.types import Keys, Leaf, ModelState, Tree


def check_model_state(config: StepConfig, state: PipelineState, batch: Tree) -> None:
    """Raises a `ValueError` for a leaf that is not finite and that the loss changes.

    The model state obeys `s[t] = s[t-1] + d[t-K]`, where d is the mean change over
    devices. If s is not finite, d is infinite or NaN too, and every update would be
    skipped. Leaves that the loss returns as they are (masks, constants) may hold any
    value.

    The check runs only in the first step after `init`, when `state.calls` is 0: `init`
    sets this counter if it finds a leaf that is not finite. Traced states are not
    checked.
    """
    first = isinstance(state.calls, np.integer) and state.calls == 0
    if not first or isinstance(state.step, jax.core.Tracer):
        return
    bad = non_finite(state.model_state)
    if not any(bad):
        return
    unchanged = _unchanged(config, state, batch)
    paths = jax.tree_util.tree_leaves_with_path(state.model_state)
    for (path, _), infinite, same in zip(paths, bad, unchanged, strict=True):
        if infinite and not same:
            raise ValueError(
                "`model_state` must be finite where `loss_fn` changes it, got"
                f" `model_state{jax.tree_util.keystr(path)}` with an infinity or NaN:"
                " its change would never be finite, and every update skipped. Start it"
                " at a number of the size of what it will hold, such as that of one"
                " batch."
            )


def non_finite(model_state: ModelState) -> list[bool]:
    """Returns for each leaf whether it holds an infinity or NaN; false for tracers."""

    def bad(leaf: Leaf) -> bool:
        if isinstance(leaf, jax.core.Tracer) or not averaged(leaf):
            return False
        if leaf.sharding.is_fully_replicated:
            return not np.isfinite(leaf.addressable_data(0)).all()
        return not jax.jit(lambda x: jnp.isfinite(x).all())(leaf)

    return [bad(leaf) for leaf in jax.tree.leaves(model_state)]


def _unchanged(config: StepConfig, state: PipelineState, batch: Tree) -> Any:
    """Returns for each leaf whether the loss returns it unchanged."""
    settings = config.step.settings
    loss_fn = full_form(settings.loss_fn, settings.compute_dtype)
    own = P(config.axis_name)

    def local(
        params: optax.Params, batch: Tree, model_state: ModelState, rng: Keys
    ) -> Any:
        return loss_fn(params, batch, model_state, rng)[1].unchanged

    specs = (P(), own, P(), P())
    local = config.on_mesh(local, specs, P())
    args = state.params, batch, state.model_state, state.rng
    return jax.eval_shape(local, *args).leaves
