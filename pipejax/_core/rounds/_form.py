"""The form of what groups train, and how it is cut into chunks."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from pipejax._core.step import Common, check_not_donated
from pipejax._internal.communication_thread import join
from pipejax._internal.mesh import AxisName, auto_mesh, on_mesh, without_mesh
from pipejax._internal.round_schedule import RoundSchedule
from pipejax._internal.structures import of_leaves
from pipejax._internal.types import ModelState, Specs, Tree

from ._flat import Chunk, added, is_padded, sliced, whole
from ._mean import mean_of_groups


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Form:
    """The form of what groups train, which chunks do not show.

    Attributes:
      structure: Structure of the pytree of parameters.
      leaves: Shape and dtype of each parameter.
      specs: How a group shards each parameter. Empty without inner axes.
      mesh: The mesh of all groups.
      axis_name: Mesh axis of the groups, or a tuple of axes.
      schedule: Which steps of a round have a chunk beside them.
      averaged: For each leaf of the model state, whether rounds average it.
      changes: How a group shards each leaf that rounds average. Empty without inner
        axes.
    """

    structure: jax.tree_util.PyTreeDef
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    specs: tuple[P, ...]
    mesh: Mesh
    axis_name: AxisName
    schedule: RoundSchedule
    averaged: tuple[bool, ...] = ()
    changes: tuple[P, ...] = ()

    @classmethod
    def of(
        cls,
        common: Common,
        changes: Tree,
        mesh: Mesh,
        name: AxisName,
        schedule: RoundSchedule,
    ) -> "Form":
        """Returns the form of what a group trains.

        `changes` have `None` in place of each leaf of the model state that rounds do
        not average.
        """
        leaves, structure = jax.tree.flatten(common.trainable.params)
        forms = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)
        there = jax.tree.map(
            lambda _, change: change is not None, common.model_state, changes
        )
        return cls(
            structure=structure,
            leaves=forms,
            specs=common.shards.params,
            mesh=mesh,
            axis_name=name,
            schedule=schedule,
            averaged=tuple(jax.tree.leaves(there)),
            changes=of_leaves(common.shards.model_state, common.model_state, changes),
        )

    def averages(self, model_state: ModelState) -> Any:
        """Returns for each leaf of the model state whether rounds average it."""
        structure = jax.tree.structure(model_state)
        return jax.tree.unflatten(structure, self.averaged)

    @property
    def chunks(self) -> int:
        """Returns the number of chunks in which parameters are exchanged."""
        return self.schedule.chunks

    def chunked(self, params: optax.Params) -> tuple[Chunk, ...]:
        """Returns parameters in chunks, inside the program of a group."""
        return tuple(self.sliced(params, number) for number in range(self.chunks))

    def is_padded(self, params: optax.Params) -> bool:
        """Returns whether chunks have padding, inside the program of a group."""
        return is_padded(params, self.chunks, self.specs)

    def sliced(self, params: optax.Params, number: ArrayLike) -> Chunk:
        """Returns one chunk of parameters, inside the program of a group."""
        return sliced(params, number, self.chunks, self.specs)

    def added(
        self, params: optax.Params, chunk: Chunk, number: ArrayLike
    ) -> optax.Params:
        """Returns parameters with one chunk added, inside the program of a group."""
        return added(params, chunk, number, self.chunks, self.specs)

    def whole(self, chunks: Sequence[Chunk]) -> Any:
        """Undoes `chunked`, inside the program of a group."""
        like = jax.tree.unflatten(self.structure, self.leaves)
        return whole(chunks, like, self.specs)

    @without_mesh()
    def params(self, chunks: Sequence[Chunk]) -> Any:
        """Undoes `chunked`, outside of the programs of groups, also of shapes."""
        if _has_shapes(chunks):
            found = jax.tree.unflatten(self.structure, self.leaves)
        else:
            join()  # Only one thread may launch collectives.
            found = self._params(tuple(chunks))
        return self.typed(found, self.specs)

    @without_mesh()
    def typed(self, tree: Tree, specs: tuple[P, ...]) -> Any:
        """Returns arrays with the axis types of the mesh, split by `specs`.

        Shapes get the sharding that arrays would have.
        """
        leaves, structure = jax.tree.flatten(tree)
        shapes = _has_shapes(tree)
        if not shapes and not all(isinstance(leaf, jax.Array) for leaf in leaves):
            return tree
        if not shapes and not specs and auto_mesh(self.mesh) == self.mesh:
            return tree
        places = [NamedSharding(self.mesh, x) for x in specs or (P(),) * len(leaves)]
        put = _with_sharding if shapes else jax.device_put
        found = [put(*pair) for pair in zip(leaves, places, strict=True)]
        return jax.tree.unflatten(structure, found)

    @without_mesh()
    def mean(self, tree: Tree, specs: Specs) -> Any:
        """Returns the mean over groups, as `mean_of_groups`, split by `specs`."""
        check_not_donated(tree)
        mesh = auto_mesh(self.mesh)
        places = jax.tree.map(lambda _, spec: NamedSharding(mesh, spec), tree, specs)
        split = tuple(place.spec for place in jax.tree.leaves(places))
        if _has_shapes(tree):
            return self.typed(jax.eval_shape(mean_of_groups, tree), split)
        program = jax.jit(mean_of_groups, out_shardings=places)
        # On CPUs, no other program with collectives may run at the same time.
        join()
        found = jax.block_until_ready(program(jax.block_until_ready(tree)))
        return self.typed(found, split)

    @without_mesh()
    def of_every_group(self, numbers: jax.Array) -> jax.Array:
        """Returns a number that all groups have alike, without asking the others."""
        check_not_donated(numbers)
        everywhere = NamedSharding(self.mesh, P())
        if isinstance(numbers, jax.ShapeDtypeStruct):
            return numbers.update(shape=(), sharding=everywhere)
        own = jax.device_get(numbers.addressable_data(0))[0]
        parts = [jax.device_put(own, x) for x in everywhere.addressable_devices]
        return jax.make_array_from_single_device_arrays((), everywhere, parts)

    @functools.cached_property
    def _params(self) -> jax.stages.Wrapped:
        if not self.specs:
            return jax.jit(self.whole)
        return jax.jit(on_mesh(self.whole, self.mesh, P(), P(), self.axis_name))


def _has_shapes(tree: Tree) -> bool:
    return any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(tree))


def _with_sharding(shape: jax.ShapeDtypeStruct, place: NamedSharding) -> Any:
    return shape.update(sharding=place)
