"""Tests the state before the first local step, and where its arrays lie."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax._core.executors import round_codec_states, round_shapes
from pipejax.codecs import error_feedback, int8
from pipejax.collectives import two_shot

from ...groups import loss_fn, mesh_of, params, placed


def made(name="fsdp", **settings):
    mesh = mesh_of(2, name)
    train = pj.make_local_step(
        loss_fn, optax.adam(1e-2), mesh=mesh, axis_name="host", **settings
    )
    return train, placed(mesh, name)


def test_groups_begin_at_the_anchor_with_nothing_in_flight():
    train, given = made(sync_every=4, overlap_steps=4)
    state = train.init(given)
    assert tuple(state.position) == (0, 0, 0)
    for name, leaf in params().items():
        assert (state.local.trainable.params[name] == leaf[None]).all()
        assert (state.params[name] == leaf).all()
    for leaf in jax.tree.leaves(state.own.reported):
        assert not leaf.any()


def test_shapes_lie_where_a_run_leaves_the_arrays():
    train, given = made()
    state = train.init(given)
    form = jax.eval_shape(lambda: state)
    shapes = round_shapes(train.rounds.config, form.shared, form.own)
    for shape, leaf in zip(
        jax.tree.leaves(shapes), jax.tree.leaves((state.shared, state.own)), strict=True
    ):
        assert leaf.sharding.is_equivalent_to(shape.sharding, leaf.ndim)


def test_codecs_keep_a_state_for_every_chunk():
    all_reduce = two_shot(error_feedback(int8(8)))
    train, given = made(sync_every=4, overlap_steps=3, all_reduce=all_reduce)
    shapes = train.abstract_state(given)
    found = round_codec_states(
        train.rounds.config, train.mesh, shapes.shared, abstract=False
    )
    assert len(found) == 3
    assert jax.tree.leaves(found)
    for state, shape in zip(
        jax.tree.leaves(found), jax.tree.leaves(shapes.own.codec_states), strict=True
    ):
        assert jnp.all(state == 0)
        assert state.shape == shape.shape
        assert state.sharding.spec == P(("host", "fsdp"))
