"""Makes the state before the first local step, or its shapes, as it lies on a mesh."""

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
    Shared,
)
from pipejax._core.step import Common, inner_state_specs
from pipejax._internal.mesh import auto_mesh
from pipejax._internal.shards import of_all_groups, optimizer_specs
from pipejax._internal.types import Tree

from ._codec_states import codec_states_of
from ._round_config import RoundConfig, stacked


def initial_rounds(
    config: RoundConfig,
    reduction_mesh: Mesh,
    common: Common,
    report: Tree,
    *,
    abstract: bool = False,
) -> Any:
    """Returns the state in which all groups begin with what is common to them.

    Args:
      config: The rounds.
      reduction_mesh: The mesh that sums the chunks.
      common: What a group trains, with its counters and keys, or the shapes.
      report: The form of what a step reports.
      abstract: Whether to return shapes with shardings in place of arrays.

    Returns:
      A `LocalState`.
    """
    inner = config.inner
    own: Any = P(inner.axis_name)
    trained, specs = common.trainable.params, common.shards.params
    form = Form.of(trained, specs, inner.mesh, inner.axis_name)

    def local(common: Common) -> tuple[Shared, GroupState]:
        zero = jnp.zeros((), jnp.int32)
        anchor = form.chunked(common.trainable.params, config.chunks)
        empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), report)
        group = GroupState(
            local=stacked(common),
            buffer=jax.tree.map(jnp.zeros_like, anchor),
            reported=empty,
            sent=jax.tree.map(jnp.copy, empty),
            codec_states=(),
        )
        outer = tuple(map(config.outer_tx.init, anchor))
        return Shared(anchor, outer, zero, form), group

    program = inner.on_mesh(local, P(), (P(), own))
    shapes = round_shapes(config, *jax.eval_shape(program, common))
    shared, group = shapes
    if not abstract:
        shardings = jax.tree.map(lambda shape: shape.sharding, shapes)
        shared, group = jax.jit(program, out_shardings=shardings)(common)
    states = round_codec_states(config, reduction_mesh, shapes[0], abstract=abstract)
    group = group._replace(codec_states=states)
    return LocalState(shared, group, Position.at(0, 0))


def round_shapes(
    config: RoundConfig, shared: Shared, group: GroupState
) -> tuple[Any, Any]:
    """Returns shapes with shardings: where each array of a state lies on the mesh.

    The codec states are left out.
    """
    axis, part = config.inner.axis_name, config.chunk_spec
    mesh, specs = auto_mesh(config.inner.mesh), inner_state_specs(group.local)

    def placed(leaf: Any, spec: P) -> jax.ShapeDtypeStruct:
        # JAX replicates arrays without elements.
        sharding = NamedSharding(mesh, spec if leaf.size else P())
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding, weak_type=leaf.weak_type
        )

    def lying(spec: P, tree: Tree) -> Any:
        return jax.tree.map(lambda leaf: placed(leaf, spec), tree)

    def of_outer(chunk: Chunk, state: Tree) -> Any:
        found = optimizer_specs(state, chunk, (part,) * len(chunk))
        return jax.tree.map(placed, state, found)

    def of_group(leaf: Any, spec: P) -> jax.ShapeDtypeStruct:
        return placed(leaf, P(axis, *spec))

    nothing: Any = None
    whole = lying(P(), shared._replace(anchor=(), outer=()))
    own = lying(P(axis), group._replace(local=nothing, buffer=(), codec_states=()))
    return (
        whole._replace(
            anchor=lying(part, shared.anchor),
            outer=tuple(map(of_outer, shared.anchor, shared.outer)),
        ),
        own._replace(
            local=jax.tree.map(of_group, group.local, specs),
            buffer=lying(of_all_groups(part, axis), group.buffer),
        ),
    )


def round_codec_states(
    config: RoundConfig, reduction_mesh: Mesh, shared: Shared, *, abstract: bool
) -> tuple[Any, ...]:
    """Returns what the codecs keep of each chunk before the first round."""
    summing = config.inner.at(reduction_mesh)

    def of_chunk(chunk: Chunk) -> Any:
        forms = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), chunk)
        like = config.message(forms, None)
        return codec_states_of(summing, like, abstract=abstract)

    return tuple(map(of_chunk, shared.anchor))
