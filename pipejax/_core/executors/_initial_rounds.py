"""Makes the state before the first local step, or its shapes, as it lies on a mesh."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pipejax._core.rounds import (
    Chunk,
    Form,
    GroupState,
    LocalState,
    Position,
    RoundPassengers,
    Shared,
)
from pipejax._core.step import Common, inner_state_specs
from pipejax._internal.mesh import auto_mesh
from pipejax._internal.round_schedule import RoundSchedule
from pipejax._internal.shards import optimizer_specs
from pipejax._internal.types import Tree

from ._codec_states import codec_states_of
from ._round_config import RoundConfig, stacked


def initial_rounds(
    config: RoundConfig,
    reduction_mesh: Mesh,
    schedule: RoundSchedule,
    common: Common,
    like: RoundPassengers,
    *,
    abstract: bool = False,
) -> LocalState:
    """Returns the state in which all groups begin with what is common to them.

    Args:
      config: The rounds.
      reduction_mesh: The mesh that sums the chunks.
      schedule: Which steps of a round have a chunk beside them.
      common: What a group trains, with its counters and keys, or the shapes.
      like: The form of what a group sends with a round. Its changes have `None` in
        place of each leaf of the model state that is not averaged.
      abstract: Whether to return shapes with shardings, and to compute nothing.

    Returns:
      The state. If `abstract`, shapes stand for arrays.
    """
    inner = config.inner
    own: Any = P(inner.axis_name)
    form = Form.of(common, like.changes, inner.mesh, inner.axis_name, schedule)

    def local(common: Common) -> tuple[Shared, GroupState]:
        zero = jnp.zeros((), jnp.int32)
        anchor = form.chunked(common.trainable.params)
        empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like.report)
        group = GroupState(stacked(common), reported=empty, codec_states=())
        outer = tuple(map(config.outer_tx.init, anchor))
        return Shared(anchor, outer, common.model_state, zero, form), group

    program = inner.on_mesh(local, P(), (P(), own))
    shapes = round_shapes(config, *jax.eval_shape(program, common))
    shared, group = shapes
    if not abstract:
        shardings = jax.tree.map(lambda shape: shape.sharding, shapes)
        shared, group = jax.jit(program, out_shardings=shardings)(common)
    states = round_codec_states(config, reduction_mesh, shapes[0], abstract=abstract)
    group = group._replace(codec_states=states)
    return LocalState(shared, group, Position.at(0, 0, config.warmup_steps))


def round_shapes(
    config: RoundConfig, shared: Shared, group: GroupState
) -> tuple[Any, Any]:
    """Returns shapes with shardings: where each array of a state lies on the mesh.

    The codec states are left out.
    """
    axis, part = config.inner.axis_name, config.chunk_spec
    mesh, specs = auto_mesh(config.inner.mesh), inner_state_specs(group.local)
    placed = functools.partial(_placed, mesh)

    def lying(spec: P, tree: Tree) -> Any:
        return jax.tree.map(lambda leaf: placed(leaf, spec), tree)

    def of_group(leaf: Any, spec: P) -> jax.ShapeDtypeStruct:
        return placed(leaf, P(axis, *spec))

    def split(tree: Tree, specs: Sequence[P], default: P) -> Any:
        leaves, structure = jax.tree.flatten(tree)
        pairs = zip(leaves, specs or (default,) * len(leaves), strict=True)
        return jax.tree.unflatten(structure, [placed(*pair) for pair in pairs])

    return (
        Shared(
            anchor=lying(part, shared.anchor),
            outer=_outer_shapes(config, shared.anchor, shared.outer),
            model_state=split(shared.model_state, group.local.shards.model_state, P()),
            refused=placed(shared.refused, P()),
            form=shared.form,
        ),
        GroupState(
            local=jax.tree.map(of_group, group.local, specs),
            reported=lying(P(axis), group.reported),
            codec_states=(),
        ),
    )


def initial_outer(config: RoundConfig, anchor: tuple[Chunk, ...]) -> Any:
    """Returns the states with which the outer optimizer begins at an anchor."""

    def local(anchor: tuple[Chunk, ...]) -> tuple[Tree, ...]:
        return tuple(map(config.outer_tx.init, anchor))

    program = config.inner.on_mesh(local, P(), P())
    shapes = _outer_shapes(config, anchor, jax.eval_shape(program, anchor))
    places = jax.tree.map(lambda shape: shape.sharding, shapes)
    return jax.jit(program, out_shardings=places)(anchor)


def _outer_shapes(
    config: RoundConfig, anchor: Sequence[Chunk], outer: Sequence[Tree]
) -> tuple[Any, ...]:
    """Returns shapes with shardings of the outer optimizer's state for each chunk."""
    mesh, part = auto_mesh(config.inner.mesh), config.chunk_spec

    def of_chunk(chunk: Chunk, state: Tree) -> Any:
        specs = optimizer_specs(state, chunk, (part,) * len(chunk))
        return jax.tree.map(functools.partial(_placed, mesh), state, specs)

    return tuple(map(of_chunk, anchor, outer))


def _placed(mesh: Mesh, leaf: Any, spec: P) -> Any:
    """Returns the shape of an array that lies on a mesh."""
    # JAX replicates arrays without elements.
    sharding = NamedSharding(mesh, spec if leaf.size else P())
    return jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=sharding, weak_type=leaf.weak_type
    )


def rescheduled(config: RoundConfig, shared: Shared, schedule: RoundSchedule) -> Shared:
    """Returns the shapes of what is the same on all groups, with another schedule."""
    form = dataclasses.replace(shared.form, schedule=schedule)

    def local(before: Sequence[Chunk]) -> tuple[tuple[Chunk, ...], tuple[Tree, ...]]:
        anchor = form.chunked(shared.form.whole(before))
        return anchor, tuple(map(config.outer_tx.init, anchor))

    program = config.inner.on_mesh(local, P(), P())
    anchor, outer = jax.eval_shape(program, shared.anchor)
    return shared._replace(anchor=anchor, outer=outer, form=form)


def round_codec_states(
    config: RoundConfig, reduction_mesh: Mesh, shared: Shared, *, abstract: bool
) -> tuple[Any, ...]:
    """Returns what the codecs keep of each chunk before the first round."""
    summing = config.inner.at(reduction_mesh)

    def of_chunk(chunk: Chunk) -> Any:
        forms = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), chunk)
        like = config.message(forms, None, shared.form)
        return codec_states_of(summing, like, abstract=abstract)

    return tuple(map(of_chunk, shared.anchor))
