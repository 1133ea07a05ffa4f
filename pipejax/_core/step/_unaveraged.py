"""Checks that model state which is not averaged stays the same on every device.

Integers, booleans and keys are not sent. If one depended on the data, every device
would have a value of its own, in an array that claims to be the same everywhere.
"""

from typing import Any

import jax
import optax

from pipejax._internal.mesh import AxisName
from pipejax._internal.sources import differing
from pipejax._internal.types import Keys, ModelState, Tree

from ._loss import Loss
from ._model_state import averaged


def check_unaveraged(
    loss_fn: Loss,
    params: optax.Params,
    batch: Tree,
    model_state: ModelState,
    rng: Keys,
    axis_name: AxisName,
) -> None:
    """Raises a `ValueError` if a leaf that is not averaged may differ between devices.

    Such leaves may depend on one another, on what `loss_fn` shares, and on what it sums
    over devices. All else counts as different: at a width above 1, devices predict
    parameters and averaged model state by gradients and changes of their own.

    Args:
      loss_fn: The loss function in its full form, inside the program of a step.
      params: Parameters.
      batch: This device's share of the batch.
      model_state: Model state.
      rng: PRNG keys of this device.
      axis_name: The axes of the data.
    """
    leaves = jax.tree_util.tree_leaves_with_path(model_state)
    if all(averaged(leaf) for _, leaf in leaves):
        return
    args = params, batch, model_state, rng
    differs = True, True, jax.tree.map(averaged, model_state), True
    found: Any = differing(lambda *x: loss_fn(*x)[1], args, differs, axis_name)
    flags = zip(leaves, jax.tree.leaves(found.model_state), strict=True)
    for (path, leaf), differ in flags:
        if differ and not averaged(leaf):
            raise ValueError(
                "`loss_fn` must return integers, booleans and keys of the model state"
                " that are the same on every device, because they are not averaged;"
                f" got `model_state{jax.tree_util.keystr(path)}` of dtype {leaf.dtype},"
                " which depends on the batch, the keys or the parameters. Return it as"
                " a metric or as the weight, keep it in float32, or sum it over"
                f" devices: jax.lax.psum(x, {axis_name!r})."
            )
