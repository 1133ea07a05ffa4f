"""Warns if the devices of a group all do the same work."""

import warnings

import optax

from pipejax._internal.shards import Shards, group_axes, split_axes
from pipejax._internal.traced_axes import constrained_axes
from pipejax._internal.types import Keys, ModelState

from ._inputs import Inputs
from ._loss import Loss


def warn_of_unused_axes(
    full: Loss,
    params: optax.Params,
    model_state: ModelState,
    rng: Keys,
    inputs: Inputs,
    shards: Shards,
) -> None:
    """Warns of inner axes along which all devices hold and compute the same.

    Must be called while a step is traced, and so warns once for each program. `full` is
    the loss function in its full form.
    """
    split = inputs.specs
    if not split.batch:
        return  # It is not known how a traced batch is split.
    mesh, inner = group_axes()
    specs = (*shards.params, *shards.model_state, *split.batch, *split.shared)
    used = {name for spec in specs for name in split_axes(spec, mesh.shape)}
    unused = {name for name in inner if mesh.shape[name] > 1} - used
    if not unused:
        return
    args = params, inputs.batch, model_state, rng, inputs.shared
    unused -= constrained_axes(full, *args)
    if unused:
        names = ", ".join(map(repr, sorted(unused)))
        warnings.warn(
            f"nothing is split over the mesh axis {names}: neither parameters nor batch"
            " are sharded over it, and `loss_fn` has no constraint that is, so that all"
            " devices along it compute the same. Shard the parameters"
            " (jax.device_put(params, NamedSharding(mesh, ...))), split the batch"
            " (train.batch(part, axis_name=...)), or leave the axis out of the mesh.",
            stacklevel=2,
        )
