"""Tests the train step under JAX's switches of dtypes, checks, transfers and meshes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax import codecs, collectives

from ..grid import each, grid
from ..helpers import assert_bits_equal, batches, init_params, loss_fn
from ..switches import SWITCHES, switched

STEPS = 3
KEY = jax.random.key(0)
ALL_REDUCES = {
    "psum": collectives.psum(),
    "fed back": collectives.two_shot(codecs.error_feedback(codecs.int8(8))),
    "rotated": collectives.two_shot(codecs.rotated(codecs.int4(8), KEY, 8)),
}


def noisy(params, batch, *, model_state, rng, shared):
    noise = jax.random.normal(rng, (batch["x"].shape[0], 1), batch["x"].dtype)
    loss = loss_fn(params, {**batch, "x": batch["x"] + noise * shared["scale"]})
    after = {"mean": model_state["mean"] * jnp.float32(0.5), "n": model_state["n"]}
    return loss, pj.Aux(metrics={"loss": loss}, model_state=after, weight=jnp.int32(4))


def trained(mesh=None, all_reduce="psum", executor="fused", width=2, rng=KEY):
    mesh = mesh or pj.data_mesh(4)
    train = pj.make_train_step(
        noisy,
        optax.sgd(0.1, momentum=0.9),
        mesh=mesh,
        width=width,
        executor=executor,
        all_reduce=ALL_REDUCES[all_reduce],
        donate=True,
    )
    place = NamedSharding(mesh, P("data"))
    data = [jax.device_put(batch, place) for batch in batches(STEPS)]
    model_state = {"mean": np.ones(2, np.float32), "n": np.int32(3)}
    shared = {"scale": np.float32(0.1)}
    given = {"model_state": model_state, "rng": rng, "shared": shared}
    state = train.init(init_params(), batch=data[0], **given)
    infos = []
    for batch in data:
        state, info = train.step(state, batch, shared)
        infos.append(info)
    state, late = train.drain(state)
    loss = pj.mean_info([*infos, *late]).loss
    return jax.device_get((state.params, state.model_state, loss))


# What a switch must not change. Each run compiles its programs.
unswitched = functools.cache(trained)


@grid(
    1,
    switch=list(SWITCHES),
    executor=["fused", "host"],
    all_reduce=list(ALL_REDUCES),
    width=[1, 2],
)
def test_jax_switches_change_no_bit(switch, executor, all_reduce, width):
    settings = {"executor": executor, "all_reduce": all_reduce, "width": width}
    wanted = unswitched(**settings)
    with switched(*SWITCHES[switch]):
        got = trained(**settings)
    assert_bits_equal(got, wanted)


CLIPPED = optax.chain(optax.clip(0.01), optax.sgd(0.1))


@pytest.mark.parametrize(
    "settings",
    [
        {"reduce_dtype": jnp.bfloat16},
        {
            "shard_optimizer": True,
            "compute_dtype": jnp.bfloat16,
            "gather_codec": codecs.int4(),
        },
        {"shard_optimizer": True, "tx": CLIPPED, "params": jnp.bfloat16},
        {"tx": CLIPPED, "params": jnp.bfloat16},
    ],
)
def test_strict_promotion_changes_no_bit_of_narrow_dtypes(settings):
    def run():
        chosen = {"tx": optax.sgd(0.1, momentum=0.9), "params": "float32"} | settings
        dtype = chosen.pop("params")
        train = pj.make_train_step(loss_fn, mesh=pj.data_mesh(4), **chosen)

        def cast(tree):
            return jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)

        state = train.init(cast(init_params()))
        for batch in batches(STEPS):
            state, _ = train.step(state, cast(batch))
        return jax.device_get(train.drain(state)[0].params)

    wanted = run()
    with switched(*SWITCHES["strict promotion"]):
        assert_bits_equal(run(), wanted)


ROUNDS = {
    "late": {"sync_every": 3, "overlap_steps": 2},
    "at once": {"sync_every": 2, "overlap_steps": 0},
}


def trained_alone(rounds="late", executor="fused", names=("data",)):
    """Returns the end of a run of local steps, and its reports.

    With two `names`, a group has two devices.
    """
    mesh = pj.data_mesh(4, axis_name=names, hosts=2 if names[1:] else None)
    train = pj.make_local_step(
        noisy,
        optax.sgd(0.1, momentum=0.9),
        mesh=mesh,
        axis_name=names[0],
        outer_tx=optax.sgd(0.7, momentum=0.9),
        warmup_steps=1,
        executor=executor,
        all_reduce=ALL_REDUCES["fed back"],
        donate=True,
        **ROUNDS[rounds],
    )
    place = NamedSharding(mesh, P(names))
    data = [jax.device_put(batch, place) for batch in batches(6)]
    shared = {"scale": np.float32(0.1)}
    model_state = {"mean": np.ones(2, np.float32), "n": np.int32(3)}
    given = {"model_state": model_state, "rng": KEY, "shared": shared}
    state, infos = train.init(init_params(), batch=data[0], **given), []
    for batch in data:
        state, info = train.step(state, batch, shared)
        infos.append(info)
    state, reports = train.drain(state)
    found = state.params, state.model_state, state.opt_state, state.step
    return jax.device_get((found, infos, reports))


alone_unswitched = functools.cache(trained_alone)


@pytest.mark.full
@grid(
    1,
    switch=list(SWITCHES),
    executor=["fused", "host"],
    rounds=list(ROUNDS),
    names=[("host", "device"), ("data",)],
)
def test_jax_switches_change_no_bit_of_local_steps(switch, executor, rounds, names):
    settings = {"executor": executor, "rounds": rounds, "names": names}
    wanted = alone_unswitched(**settings)
    with switched(*SWITCHES[switch]):
        got = trained_alone(**settings)
    if switch == "debug nans":  # what has not arrived is then 0 in place of NaN
        wanted = jax.tree.map(np.nan_to_num, wanted)
    assert_bits_equal(got, wanted)


@pytest.mark.parametrize("executor", each(["fused", "host"], full=["host"]))
@pytest.mark.parametrize("mesh", each(["auto", "explicit"], full=["auto"]))
def test_set_mesh_with_explicit_axes_changes_no_bit(executor, mesh):
    explicit = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    wanted = unswitched(executor=executor)
    with jax.set_mesh(explicit):
        own = explicit if mesh == "explicit" else pj.data_mesh(4)
        assert_bits_equal(trained(own, executor=executor), wanted)


@pytest.mark.full
@pytest.mark.parametrize("sharded", each([False, True], full=[False]))
def test_set_mesh_of_another_mesh_changes_no_bit(sharded):
    """The mesh that is set has neither the axes nor the devices of the step."""
    mesh = pj.data_mesh(4, axis_name=("host", "fsdp"), hosts=2)

    def run():
        train = pj.make_train_step(
            loss_fn,
            optax.adam(0.1),
            mesh=mesh,
            axis_name="host",
            shard_optimizer=sharded,
        )
        params = init_params()
        params["hidden"] = jax.device_put(
            params["hidden"][:4], NamedSharding(mesh, P("fsdp"))
        )
        data = [{"x": x["x"][:, :4], "y": x["y"]} for x in batches(2)]
        state = train.init(params, batch=data[0])
        assert sharded or train.transfers(state, data[0])
        for batch in data:
            state, _ = train.step(state, train.batch(batch))
        return train.drain(state)[0].params

    wanted = run()
    other = jax.make_mesh((2,), ("other",), devices=jax.devices()[4:6])
    with jax.set_mesh(other):
        assert_bits_equal(run(), wanted)


def test_explicit_state_is_usable_inside_set_mesh():
    """A state on an Explicit mesh can be computed with inside `jax.set_mesh`."""
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    train = pj.make_train_step(loss_fn, optax.sgd(0.1), mesh=mesh)
    with jax.set_mesh(mesh):
        state = train.init(init_params())
        (batch,) = batches(1)
        state, info = jax.jit(train.step)(state, batch)
        assert np.isfinite(jnp.mean(state.params["out"]) + state.params["bias"][0])
        assert not info.arrived


def test_loop_inside_set_mesh_has_the_same_bits():
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    train = pj.make_train_step(loss_fn, optax.sgd(0.1), mesh=mesh)
    data = jax.tree.map(lambda *leaves: np.stack(leaves), *batches(STEPS))

    def step(state, batch):
        state, info = train.step(state, batch)
        return state, info.loss

    wanted = jax.lax.scan(step, train.init(init_params()), data)[0].params
    with jax.set_mesh(mesh):
        got = jax.lax.scan(step, train.init(init_params()), data)[0].params
    assert_bits_equal(got, wanted)


@pytest.mark.parametrize(
    ("name", "value"),
    [("jax_default_prng_impl", "rbg"), ("jax_threefry_partitionable", False)],
)
def test_other_random_generators_give_a_finite_loss(name, value):
    with switched(name, value):
        _, _, loss = trained(rng=jax.random.key(0))
    assert np.isfinite(loss)


@pytest.mark.parametrize("width", each([1, 2], full=[1]))
def test_x64_changes_only_roundings(width):
    wanted = unswitched(width=width)
    with jax.enable_x64(True):
        got = trained(width=width)
    assert got[0]["out"].dtype == np.float32
    for a, b in zip(*map(jax.tree.leaves, (got, wanted)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


def test_missing_loss_is_zero_under_debug_nans():
    train = pj.make_train_step(loss_fn, optax.sgd(0.1), mesh=pj.data_mesh(4))
    (batch,) = batches(1)
    with switched("jax_debug_nans", True):
        _, info = train.step(train.init(init_params()), batch)
    assert float(info.loss) == 0
    assert not info.arrived
