"""The state of a run of local steps."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from pipejax._core.message import Passengers
from pipejax._core.step import Common, check_not_donated, inner_state_specs
from pipejax._internal.mesh import AxisName, auto_mesh, on_mesh, without_mesh
from pipejax._internal.round_schedule import RoundSchedule
from pipejax._internal.structures import of_leaves
from pipejax._internal.types import CodecStates, ModelState, Specs, Tree

from ._flat import Chunk, added, sliced, whole
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
        elif self.specs:
            found = self._params(tuple(chunks))
        else:
            found = self.whole(chunks)
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
        found = jax.block_until_ready(program(jax.block_until_ready(tree)))
        return self.typed(found, split)

    @functools.cached_property
    def _params(self) -> jax.stages.Wrapped:
        return jax.jit(on_mesh(self.whole, self.mesh, P(), P(), self.axis_name))


def _has_shapes(tree: Tree) -> bool:
    return any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(tree))


def _with_sharding(shape: jax.ShapeDtypeStruct, place: NamedSharding) -> Any:
    return shape.update(sharding=place)


class GroupModel(NamedTuple):
    """The part of what a group trains that a round moves."""

    params: optax.Params
    model_state: ModelState


class Shared(NamedTuple):
    """The part of a state that is the same on all groups.

    Attributes:
      anchor: The parameters that all groups agree on, in chunks.
      outer: The state of the outer optimizer for each chunk.
      model_state: The model state that all groups agree on.
      refused: int32, the number of chunks so far that were left out, because they were
        not finite.
      form: The form of what groups train. It has no leaves.
    """

    anchor: tuple[Chunk, ...]
    outer: tuple[optax.OptState, ...]
    model_state: ModelState
    refused: jax.Array
    form: Form

    @property
    def params(self) -> Any:
        """Returns the anchor in the shapes of the parameters."""
        check_not_donated(self)  # JAX may end the process if it reads such an array
        return self.form.params(self.anchor)


class RoundPassengers(NamedTuple):
    """The part of a round that travels with its last chunk, and that no codec changes.

    Attributes:
      report: Mean over the steps of the round of what a group reports.
      changes: By how much the model state of a group differs from the one that all
        agree on, as in a message.
    """

    report: Passengers
    changes: Tree


class GroupState(NamedTuple):
    """The part of a state of which each group has its own.

    On a mesh of p groups, arrays of `local` have a leading axis of length p. All others
    are concatenated along their first axis.

    Attributes:
      local: What the group trains by itself, and its counters and keys.
      reported: Sum over the steps since the last report of what the group reports.
      codec_states: What the codecs keep of each chunk until the next round.
    """

    local: Common
    reported: Passengers
    codec_states: tuple[CodecStates, ...]


class Position(NamedTuple):
    """The place of the next step in its round, kept on the host.

    Attributes:
      taken: Number of steps of the round that have been taken.
      reported: Number of steps since the last report, or since a drain.
      warmup: Number of synchronous steps before the first round that are not taken yet.
    """

    taken: np.int32
    reported: np.int32
    warmup: np.int32

    @classmethod
    def at(cls, taken: int, reported: int, warmup: int = 0) -> "Position":
        """Returns the place after so many steps."""
        return cls(np.int32(taken), np.int32(reported), np.int32(warmup))


class LocalState(NamedTuple):
    """Everything that a run of local steps needs to continue, as one pytree.

    Attributes:
      shared: What is the same on all groups: the anchor, in chunks, the state of the
        outer optimizer, and `state.model_state`. `state.params` is the anchor in the
        shapes of the parameters.
      own: What each group has of its own, with a leading axis of groups. `state.local`
        is what it trains.
      position: The place of the next step in its round, kept on the host.
    """

    shared: Shared
    own: GroupState
    position: Position

    @property
    def params(self) -> Any:
        """Returns the anchor, which is the same on all groups."""
        return self.shared.params

    @property
    def model_state(self) -> ModelState:
        """Returns the model state that all groups agree on, after the last round."""
        form, specs = self.shared.form, self.local.shards.model_state
        return form.typed(self.shared.model_state, specs)

    @property
    def opt_state(self) -> Any:
        """Returns the mean over groups of their states of the inner optimizer.

        Counters are those of the first group. On several processes, groups exchange
        their states, so that all processes must read this property.
        """
        specs = inner_state_specs(self.local).trainable.opt_state
        return self.shared.form.mean(self.local.trainable.opt_state, specs)

    @property
    def step(self) -> jax.Array:
        """Returns the number of steps that every group has taken, as `opt_state`."""
        return self.shared.form.mean(self.local.step, P())

    @property
    def local(self) -> Common:
        """Returns what each group trains, with a leading axis of groups."""
        return self.own.local

    @property
    def groups(self) -> int:
        """Returns the number of groups."""
        return len(self.own.local.step)
