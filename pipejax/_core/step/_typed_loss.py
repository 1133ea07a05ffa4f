"""Runs the loss function on the axis types of the user's mesh.

All axes have type Auto in the program of a step. `jax.make_mesh` makes axes of type
Explicit, over which the type of an array says how it is split. A model that is written
for such a mesh reads these types, and says how its activations are split:
`jnp.einsum(..., out_sharding=P("fsdp"))`.
"""

from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from pipejax._internal.shards import Shards, group_axes, over
from pipejax._internal.types import Keys, ModelState, Tree

from ._inputs import InputSpecs
from ._loss import Loss, full_form
from ._step import Settings


def typed_loss(settings: Settings, shards: Shards, split: InputSpecs) -> Loss:
    """Returns the loss function in its full form, over axes of the mesh's types.

    Its arguments and results have axes of type Auto. Specs that are not known are those
    of arrays that are not split.
    """
    full, names = full_form(settings.loss_fn, settings.compute_dtype), settings.explicit
    if not names:
        return full

    def typed(
        params: Tree,
        batch: Tree,
        model_state: ModelState,
        rng: Keys,
        shared: Tree = None,
    ) -> Any:
        given = params, batch, model_state, rng, shared
        specs = shards.params, split.batch, shards.model_state, (), split.shared
        types = tuple(map(types_of, given, specs))

        def on(mesh: AbstractMesh) -> Any:
            with jax.sharding.use_abstract_mesh(mesh):
                return full(*jax.sharding.reshard(given, types))

        mesh, _ = group_axes()
        explicit = dict.fromkeys(names, AxisType.Explicit)
        try:
            found = on(mesh.update_axis_types(explicit))
        except NotImplementedError as error:
            # `jax.sharding.auto_axes` takes all axes, as in `flax.nnx.Embed`, and none
            # may be Manual, as those of the data are. No array here is split over them,
            # so that type Explicit says the same.
            if "Going from `Manual`" not in str(error):
                raise
            manual = dict.fromkeys(mesh.manual_axes, AxisType.Explicit)
            found = on(mesh.update_axis_types(explicit | manual))
        return jax.sharding.reshard(found, P())

    def types_of(tree: Tree, specs: tuple[P, ...]) -> Any:
        leaves, structure = jax.tree.flatten(tree)
        types = [over(spec, names) for spec in specs] or [P()] * len(leaves)
        return jax.tree.unflatten(structure, types)

    return typed
