"""The first step of a run looks at the model state: an infinity in it would stay."""

from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from ._loss import full_form, is_floating
from ._state import PipelineState

if TYPE_CHECKING:
    from ._step import TrainStep


def check_model_state(train: "TrainStep", state: PipelineState, batch: Any) -> None:
    """Raises a ValueError for a leaf that is not finite and that the loss changes.

    Model state obeys `s[t] = s[t-1] + d[t-K]` with the reduced change d. Where s is
    infinite, so is d, or NaN, and every update would be skipped. Leaves which the loss
    returns as they are (masks, constants) may hold anything.

    Only at the first step after `init`, which has found such a leaf; a state that is
    being traced is not looked at.
    """
    first = isinstance(state.calls, np.integer) and state.calls == 0
    if not first or isinstance(state.step, jax.core.Tracer):
        return
    bad = non_finite(state.model_state)
    if not any(bad):
        return
    unchanged = _unchanged(train, state, batch)
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


def non_finite(model_state: Any) -> list[bool]:
    """Returns for each leaf whether it holds an infinity or NaN; not of tracers."""

    def bad(leaf: Any) -> bool:
        if isinstance(leaf, jax.core.Tracer) or not is_floating(leaf):
            return False
        return not np.isfinite(leaf.addressable_data(0)).all()

    return [bad(leaf) for leaf in jax.tree.leaves(model_state)]


def _unchanged(train: "TrainStep", state: PipelineState, batch: Any) -> Any:
    """Returns for each leaf whether the loss returns it as it was."""
    loss_fn = full_form(train.local_step.loss_fn, train.local_step.compute_dtype)
    own = P(train.axis_name)

    def local(params: Any, batch: Any, model_state: Any, rng: Any) -> Any:
        return loss_fn(params, batch, model_state, rng)[1].unchanged

    specs = (P(), own, P(), P())
    local = train.config.on_mesh(local, specs, P())
    args = state.params, batch, state.model_state, state.rng
    return jax.eval_shape(local, *args).leaves
