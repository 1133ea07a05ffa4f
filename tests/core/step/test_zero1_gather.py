"""Tests the coded all-gather of a sharded optimizer, against a recursion by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax import codecs

from ...grid import grid
from ...helpers import assert_bits_equal
from .test_zero1 import assert_close, batches, loss_fn, params, run

CODECS = {"int8": codecs.int8(16), "int4": codecs.int4(16), "bf16": codecs.bf16()}
# The axis along which each parameter is cut, in the order of its leaves.
CUTS = {"bias": 0, "down": 0, "scale": None, "up": 1}


def pieces(tree, devices, rank):
    """Returns the pieces of a device, of the arrays that are cut."""
    found = {}
    for name, axis in CUTS.items():
        if axis is not None:
            found[name] = np.split(np.asarray(tree[name]), devices, axis)[rank]
    return found


def coded(codec, difference, devices):
    """Returns arrays as all devices decode them, each device's pieces as one vector."""
    rows = []
    for rank in range(devices):
        own = pieces(difference, devices, rank)
        vector = np.concatenate([own[name].ravel() for name in sorted(own)])
        padded = np.pad(vector, (0, -len(vector) % codec.multiple))
        payload, _ = codec.encode(jnp.asarray(padded), ())
        decoded = np.asarray(codec.decode(payload, len(padded)))
        ends = np.cumsum([own[name].size for name in sorted(own)])
        parts = np.split(decoded[: ends[-1]], ends[:-1])
        shapes = (own[name].shape for name in sorted(own))
        rows.append([x.reshape(s) for x, s in zip(parts, shapes, strict=True)])
    names = [name for name in sorted(CUTS) if CUTS[name] is not None]
    joined = {
        name: np.concatenate([row[i] for row in rows], CUTS[name])
        for i, name in enumerate(names)
    }
    return joined | {name: difference[name] for name in CUTS if CUTS[name] is None}


def by_hand(codec, width, devices, steps, rate=0.1):
    """Returns master and gathered parameters before the drain.

    The master parameters take the update; gradients are taken at gathered ones, which
    move by the difference that is decoded.
    """
    master = {name: np.float32(x) for name, x in params().items()}
    gathered, pending = dict(master), []
    for batch in batches(steps):
        pending.append(jax.device_get(jax.grad(loss_fn)(gathered, batch)))
        if len(pending) == width:
            due = pending.pop(0)
            master = {name: master[name] - rate * due[name] for name in master}
        difference = {name: master[name] - gathered[name] for name in master}
        moves = coded(codec, difference, devices)
        # An array that is not cut is on all devices.
        gathered = {
            name: master[name] if CUTS[name] is None else gathered[name] + moves[name]
            for name in master
        }
    return master, gathered


@grid(0, codec=("int4", "int8", "bf16"), width=(2, 1, 3), devices=(4, 2))
def test_gathered_parameters_move_by_decoded_differences(codec, width, devices):
    train = pj.make_train_step(
        loss_fn,
        optax.sgd(0.1),
        mesh=pj.data_mesh(devices),
        width=width,
        weight_prediction=False,
        shard_optimizer=True,
        gather_codec=CODECS[codec],
    )
    state = train.init(params())
    for batch in batches(7):
        state, _ = train.step(state, batch)
    master, gathered = by_hand(CODECS[codec], width, devices, 7)
    # A difference close to the middle of two levels may be rounded to either.
    level = {"int4": 0.003, "int8": 2e-4, "bf16": 2e-4}[codec]
    assert_close(state.params, master, level)
    assert_close(state.gathered, gathered, level)
    apart = max(np.abs(gathered[name] - master[name]).max() for name in CUTS)
    assert apart > 1e-6  # the codec loses something


@grid(
    0,
    name=("adamw", "momentum"),
    width=(2, 3),
    devices=(4, 8),
    executor=("fused", "host"),
)
def test_predicted_runs_stay_close_to_exact_gathers(name, width, devices, executor):
    tx = {"adamw": optax.adamw(1e-2), "momentum": optax.sgd(0.05, momentum=0.9)}[name]
    options = {"width": width, "shard_optimizer": True, "executor": executor}
    exact, losses = run(tx, devices, **options)
    found, others = run(tx, devices, gather_codec=codecs.int8(16), **options)
    assert_close(found.params, exact.params, 2e-3)
    np.testing.assert_allclose(others, losses, rtol=2e-3)
    for name, whole in found.gathered.items():  # as a drain leaves them
        assert_bits_equal(np.asarray(whole), np.asarray(found.params[name]))


@grid(0, width=(2, 1), name=("adamw", "momentum"))
def test_both_executors_have_the_same_bits(width, name):
    tx = {"adamw": optax.adamw(1e-2), "momentum": optax.sgd(0.05, momentum=0.9)}[name]
    runs = [
        run(
            tx,
            width=width,
            weight_prediction=False,
            shard_optimizer=True,
            gather_codec=codecs.int4(16),
            executor=executor,
        )
        for executor in ("fused", "host")
    ]
    (a, losses), (b, others) = jax.device_get(
        [(state.trainable, loss) for state, loss in runs]
    )
    assert_bits_equal(a, b)
    assert_bits_equal(losses, others)


def groups():
    """Returns a mesh of two groups of two devices, and parameters that they shard."""
    types = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=types)
    split = {"up": P(None, "model"), "bias": P("model"), "down": P("model")}
    placed = {
        name: jax.device_put(x, NamedSharding(mesh, split.get(name, P())))
        for name, x in params().items()
    }
    return mesh, placed


@pytest.mark.full
def test_devices_of_groups_gather_the_same_bits():
    mesh, placed = groups()
    found = {}
    for codec in (None, codecs.int8(8)):
        train = pj.make_train_step(
            loss_fn,
            optax.adamw(1e-2),
            mesh=mesh,
            shard_optimizer=True,
            gather_codec=codec,
        )
        state = train.init(placed)
        for batch in batches(6):
            state, info = train.step(state, batch)
        found[codec is None] = state, float(info.loss)
    (state, loss), (exact, wanted) = found[False], found[True]
    assert loss == pytest.approx(wanted, rel=1e-3)
    assert_close(state.params, exact.params, 2e-3)
    for whole in state.gathered.values():
        by_place = {}
        for shard in whole.addressable_shards:
            by_place.setdefault(str(shard.index), []).append(np.asarray(shard.data))
        for copies in by_place.values():
            for copy in copies[1:]:
                assert_bits_equal(copy, copies[0])


def test_frozen_parameters_of_groups_are_gathered_with_the_others():
    mesh, placed = groups()
    labels = {name: "frozen" if name == "bias" else "trained" for name in placed}
    tx = optax.partition(
        {"frozen": optax.set_to_zero(), "trained": optax.adamw(1e-2)}, labels
    )
    options = {"mesh": mesh, "shard_optimizer": True, "gather_codec": codecs.int8(8)}
    train = pj.make_train_step(loss_fn, tx, **options)
    state = train.init(placed)
    for batch in batches(6):
        state, _ = train.step(state, batch)
    assert_bits_equal(np.asarray(state.gathered["bias"]), params()["bias"])
    state, _ = train.drain(state)
    for name, whole in state.gathered.items():
        assert_bits_equal(np.asarray(whole), np.asarray(state.params[name]))


def settled(dtype, factor, codec=CODECS["int4"]):
    """Returns parameters and gathered ones after 40 steps, of which 1 has a gradient.

    It is `factor`, for the first element of the first block.
    """

    def loss(params, batch):
        return jnp.mean(batch) * params["x"][0].astype(jnp.float32)

    train = pj.make_train_step(
        loss,
        optax.sgd(1.0),
        mesh=pj.data_mesh(2),
        width=1,
        compute_dtype=dtype,
        shard_optimizer=True,
        gather_codec=codec,
    )
    rng = np.random.default_rng(0)
    state = train.init({"x": rng.normal(size=64).astype(np.float32) / 99})
    for step in range(40):
        scale = {1: -factor, 2: factor}.get(step, 0.0)
        state, _ = train.step(state, np.full(4, scale, np.float32))
    return np.asarray(state.params["x"]), np.asarray(state.gathered["x"])


def test_gathered_parameters_settle_at_rounded_parameters():
    """A rounding that they cannot hold does not stay in the differences."""
    found, gathered = settled(jnp.bfloat16, 1.0)
    assert_bits_equal(gathered, np.asarray(jnp.bfloat16(found)))


def test_gathered_parameters_recover_from_an_overflow():
    found, gathered = settled(jnp.float16, 1e5)
    np.testing.assert_allclose(gathered, found, rtol=2e-3, atol=1e-6)


def test_infinite_parameters_are_gathered_with_the_others():
    """Minus infinity has no difference that a codec could send."""
    mask = np.where(np.arange(16) < 9, 0, -np.inf).astype(np.float32)

    def loss(params, batch):
        shares = jnp.exp(jax.lax.stop_gradient(params["mask"]))
        return loss_fn(params | {"bias": params["bias"] * shares}, batch)

    train = pj.make_train_step(
        loss,
        optax.sgd(0.1),
        mesh=pj.data_mesh(4),
        shard_optimizer=True,
        gather_codec=codecs.int8(16),
    )
    state = train.init(params() | {"mask": mask})
    for batch in batches(4):
        state, _ = train.step(state, batch)
    assert int(state.skipped) == 0
    assert_bits_equal(np.asarray(state.gathered["mask"]), mask)
    for name, whole in state.gathered.items():
        np.testing.assert_allclose(whole, state.params[name], atol=0.02)


def test_drain_at_width_1_gathers_all_bits_of_parameters():
    for executor in ("fused", "host"):
        options = {"width": 1, "shard_optimizer": True, "executor": executor}
        state, _ = run(optax.adamw(1e-2), gather_codec=codecs.int4(16), **options)
        for name, whole in state.gathered.items():
            assert_bits_equal(np.asarray(whole), np.asarray(state.params[name]))


def test_codec_has_no_effect_on_one_device():
    options = {"devices": 1, "shard_optimizer": True}
    exact, _ = run(optax.adamw(1e-2), **options)
    found, _ = run(optax.adamw(1e-2), gather_codec=codecs.int4(16), **options)
    assert_bits_equal(*jax.device_get([exact.trainable, found.trainable]))


@pytest.mark.full
def test_parameters_in_a_compute_dtype_differ_by_less_than_its_rounding():
    options = {"shard_optimizer": True, "width": 2, "compute_dtype": jnp.bfloat16}
    state, _ = run(optax.adamw(1e-2), gather_codec=codecs.int8(16), **options)
    exact, _ = run(optax.adamw(1e-2), **options)
    assert {x.dtype for x in state.gathered.values()} == {jnp.dtype(jnp.bfloat16)}
    assert_close(state.params, exact.params, 5e-3)


def test_all_gather_sends_the_payload_of_the_codec():
    def sent(codec):
        train = pj.make_train_step(
            loss_fn,
            optax.sgd(0.1),
            mesh=pj.data_mesh(4),
            shard_optimizer=True,
            gather_codec=codec,
        )
        state = train.init(params(128, 128))
        batch = {"x": jnp.ones((16, 128)), "y": jnp.ones((16, 128))}
        found = train.transfers(state, batch)
        return sum(x.wire_bytes for x in found if x.kind == "all-gather")

    # A quarter of the arrays, padded to even numbers of blocks, goes to three devices.
    codec, pieces = codecs.int4(64), (128 * 16 + 16 + 16 * 128) // 4
    assert sent(codec) == 3 * codec.size(128 * -(-pieces // 128)) < sent(None) / 6


def test_gathered_parameters_follow_after_a_bad_gradient():
    train = pj.make_train_step(
        loss_fn,
        optax.sgd(0.1),
        mesh=pj.data_mesh(4),
        width=2,
        shard_optimizer=True,
        gather_codec=codecs.int4(16),
    )
    state = train.init(params())
    for i, batch in enumerate(batches(6)):
        bad = batch | {"x": batch["x"] * np.float32(np.nan if i == 2 else 1)}
        state, _ = train.step(state, bad)
    assert int(state.skipped) == 1
    for name, whole in state.gathered.items():
        np.testing.assert_allclose(whole, state.params[name], atol=0.02)


@pytest.mark.parametrize(
    ("codec", "remedy"),
    [
        (codecs.error_feedback(codecs.int4()), "needs no error feedback"),
        (codecs.sign(), "nearest level"),
        (codecs.power_sgd(1, jax.random.key(0)), "nearest level"),
        ("int4", "got 'int4'"),
    ],
)
def test_codecs_with_state_or_bias_are_refused(codec, remedy):
    with pytest.raises(ValueError, match=f"`gather_codec` .*{remedy}"):
        pj.make_train_step(
            loss_fn,
            optax.sgd(0.1),
            mesh=pj.data_mesh(2),
            shard_optimizer=True,
            gather_codec=codec,
        )


def test_codec_of_a_gather_without_a_sharded_optimizer_is_refused():
    with pytest.raises(ValueError, match="`gather_codec` must be None without"):
        pj.make_train_step(
            loss_fn, optax.sgd(0.1), mesh=pj.data_mesh(2), gather_codec=codecs.int4()
        )


def test_train_step_with_a_codec_is_made_without_transfers():
    mesh = pj.data_mesh(2)
    with jax.transfer_guard("disallow"):
        pj.make_train_step(
            loss_fn,
            optax.sgd(0.1),
            mesh=mesh,
            shard_optimizer=True,
            gather_codec=codecs.int4(16),
        )
