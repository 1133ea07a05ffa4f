"""Tests the state before the first step: its contents and owners."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax import codecs, collectives
from pipejax.train_step._init import _codec_keys

from ..grid import grid
from ..helpers import assert_bits_equal, batches, init_params, loss_fn

DEVICES = 2


def noting(params, batch, *, model_state, rng):
    """Returns all that a loss function may return, with a weight of one an example."""
    del rng
    loss = (params["w"] * batch.mean()).sum() + params["b"]
    after = {"mean": model_state["mean"] + 1, "seen": model_state["seen"] + 1}
    return loss, pj.Aux({"twice": 2 * loss}, after, batch.size)


@grid(1, dtype=[np.dtype("float32"), jnp.dtype("bfloat16")])
def test_first_state_equals_arrays_by_hand(dtype):
    """At width 3 there is room for two messages, with one row for each device.

    Loss, weight and metric stay float32.
    """
    train = pj.make_train_step(
        noting,
        optax.sgd(0.1, momentum=0.9),
        mesh=pj.data_mesh(DEVICES),
        width=3,
        reduce_dtype=dtype,
        weight_prediction="own",
    )
    params = {"w": np.ones((3, 2), np.float32), "b": np.float32(5)}
    model_state = {"mean": np.float32(4), "seen": np.int32(7)}
    state = train.init(
        params,
        model_state=model_state,
        rng=jax.random.key(3),
        batch=jax.ShapeDtypeStruct((8,), np.float32),  # only its shape is used
    )
    assert_bits_equal(state.params, params)
    assert_bits_equal(state.model_state, model_state)
    assert_bits_equal(state.opt_state[0].trace, jax.tree.map(np.zeros_like, params))
    assert_bits_equal(*map(jax.random.key_data, (state.rng, jax.random.key(3))))
    assert_bits_equal((state.step, state.skipped), (np.int32(0), np.int32(0)))
    gradients = {"w": np.zeros((6, 2), dtype), "b": np.zeros(2, dtype)}
    in_flight = state.in_flight
    assert len(in_flight.pending) == 2
    for message in in_flight.pending:
        assert_bits_equal(message.gradients, gradients)
        assert_bits_equal(message.changes, {"mean": np.zeros(2, dtype), "seen": None})
        assert_bits_equal(message.passengers.values, np.zeros(2 * 3, np.float32))
    assert_bits_equal(in_flight.filled, np.zeros(2, np.int32))


def test_state_is_shared_and_the_queue_is_split_over_devices():
    train = pj.make_train_step(loss_fn, optax.adam(0.1), mesh=pj.data_mesh(DEVICES))
    state = train.init(init_params())
    shared = jax.tree.leaves(state._replace(in_flight=None))
    assert all(leaf.is_fully_replicated for leaf in shared)
    for leaf in jax.tree.leaves(state.in_flight):
        rows = {len(shard.data) for shard in leaf.addressable_shards}
        assert rows == {len(leaf) // DEVICES}


def test_opt_state_given_to_init_continues_the_run():
    train = pj.make_train_step(
        loss_fn, optax.adamw(1e-2), mesh=pj.data_mesh(4), width=1
    )
    data, states = batches(6), [train.init(init_params())]
    for batch in data:
        states.append(train.step(states[-1], batch)[0])
    again = train.init(states[3].params, opt_state=states[3].opt_state)
    for batch in data[3:]:
        again, _ = train.step(again, batch)
    assert int(again.opt_state[0].count) == 6
    assert_bits_equal(
        (again.params, again.opt_state), (states[-1].params, states[-1].opt_state)
    )


def test_eval_shape_of_init_gives_the_shapes_of_the_state():
    train = pj.make_train_step(loss_fn, optax.adam(1e-3), mesh=pj.data_mesh(4), width=3)
    shapes = jax.eval_shape(train.init, init_params())
    chex.assert_trees_all_equal_shapes_and_dtypes(shapes, train.init(init_params()))


def test_donation_spares_the_parameters_of_the_user():
    train = pj.make_train_step(
        loss_fn, optax.sgd(0.1), mesh=pj.data_mesh(2), donate=True
    )
    params = jax.tree.map(jnp.asarray, init_params())
    on_mesh = jax.device_put(params, jax.NamedSharding(train.mesh, P()))
    for given in (params, on_mesh):
        state = train.init(given)
        after, _ = train.step(state, batches(1)[0])
        assert_bits_equal(jax.tree.map(np.asarray, given), init_params())
        assert state.params["out"].is_deleted()
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(after))


@grid(1, microbatches=[1, 2], executor=["fused", "host"])
def test_several_keys_give_the_same_draws_as_each_alone(executor, microbatches):
    """The loss gets the pytree of `init`, and each key in it moves as a single one."""
    keys = {"a": jax.random.key(3), "b": [jax.random.PRNGKey(4)]}

    def drawn(rng):
        return sum(jax.random.normal(key) for key in jax.tree.leaves(rng))

    def loss(params, batch, *, rng):
        return params["w"] * batch.mean(), pj.Aux(metrics=drawn(rng))

    def metrics(rng):
        train = pj.make_train_step(
            loss,
            optax.sgd(0.1),
            mesh=pj.data_mesh(DEVICES),
            executor=executor,
            microbatches=microbatches,
        )
        batch, found = np.ones(4, np.float32), []
        state = train.init({"w": np.float32(1)}, rng=rng, batch=batch)
        for _ in range(3):
            state, info = train.step(state, batch)
            found.append(info)
        _, infos = train.drain(state)
        return np.array([float(x.metrics) for x in (*found, *infos)][1:])

    # float32 rounding of a sum of two numbers below 4, averaged over four parts
    wanted = metrics(keys["a"]) + metrics(keys["b"][0])
    np.testing.assert_allclose(metrics(keys), wanted, rtol=0, atol=4 * 4 * 2**-24)


def test_state_at_width_2_has_four_copies_and_one_for_each_device():
    """Parameters, two moments, the last mean, and a gradient of each device."""
    params = {"w": np.zeros((64, 64), np.float32)}
    train = pj.make_train_step(
        lambda params, x: (x @ params["w"]).mean(),
        optax.adamw(1e-3),
        mesh=pj.data_mesh(4),
    )
    sizes = [leaf.size for leaf in jax.tree.leaves(train.init(params))]
    assert sum(size for size in sizes if size >= 64 * 64) == (4 + 4) * 64 * 64


def test_keys_of_all_codecs_are_compared_between_processes():
    keys = list(jax.random.split(jax.random.key(0), 4))
    drawn = codecs.stochastic(codecs.int8(8), keys[0])
    outer = collectives.two_shot(codecs.error_feedback(drawn))
    inner = collectives.ring(codecs.rotated(codecs.int8(8), keys[1], block=64))
    train = pj.make_train_step(
        loss_fn,
        optax.sgd(0.1),
        mesh=pj.data_mesh(4, axis_name=("host", "device"), hosts=2),
        axis_name=("host", "device"),
        at_once=codecs.power_sgd(1, keys[2]),
        all_reduce=collectives.hierarchical(inner=inner, outer=outer),
    )
    found = {
        bytes(np.asarray(jax.random.key_data(x))) for x in _codec_keys(train.config)
    }
    wanted = {bytes(np.asarray(jax.random.key_data(x))) for x in keys[:3]}
    assert found == wanted


@pytest.mark.parametrize(("width", "percent"), [(24, None), (16, "100"), (3, "100")])
def test_undivided_optimizer_is_logged(width, percent, caplog):
    """Sides of 16 do not divide among 6 devices."""
    train = pj.make_train_step(
        lambda w, batch: jnp.mean((batch @ w) ** 2),
        optax.adam(0.1),
        mesh=pj.data_mesh(6),
        shard_optimizer=True,
    )
    train.init(jnp.ones((width, width)))
    found = [x.message for x in caplog.records if "no free axis" in x.message]
    assert len(found) == (percent is not None)
    assert all(message.startswith(f"{percent} % of the par") for message in found)
