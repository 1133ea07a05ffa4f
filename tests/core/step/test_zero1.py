"""Tests a sharded optimizer against the same train step with an unsharded one."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax import codecs, collectives
from pipejax._core.step import zero1_step
from pipejax.overlap import inspect

from ...grid import grid
from ...helpers import assert_bits_equal, normal_batches
from ...switches import SWITCHES, switched

OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.05, momentum=0.9),
    "adamw": optax.adamw(1e-2, weight_decay=0.1),
    "clip+adamw": optax.chain(
        optax.clip_by_global_norm(0.3), optax.adamw(1e-2, weight_decay=0.1)
    ),
    "clip+momentum": optax.chain(
        optax.clip_by_global_norm(0.3), optax.sgd(0.05, momentum=0.9, nesterov=True)
    ),
}
FULL = pytest.mark.full
ONE_PYTHON = pytest.mark.one_python  # each compiles steps for 5 processor seconds


def params(inputs=5, outputs=3):
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    return {
        "up": normal(inputs, 16) / 2,
        "bias": normal(16) / 9,
        "down": normal(16, outputs) / 4,
        "scale": np.float32(1.1),
    }


def loss_fn(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["up"] + params["bias"][None])
    return params["scale"] * jnp.mean((hidden @ params["down"] - batch["y"]) ** 2)


def batches(count):
    return normal_batches(count, size=16, inputs=5, outputs=3)


def run(
    tx, devices=4, *, steps=6, loss=loss_fn, init=(), mesh=None, exact=False, **options
):
    """Returns the drained state and the losses of a run.

    If `exact`, slopes travel in the dtype of the parameters, and not in 8 bits.
    """
    mesh = mesh or pj.data_mesh(devices)
    train = pj.make_train_step(loss, tx, mesh=mesh, **options)
    if exact:
        settings = dataclasses.replace(train.settings, slope_dtype=jnp.float32)
        config = dataclasses.replace(
            train.config, step=zero1_step(settings, train.config.devices)
        )
        train = dataclasses.replace(train, config=config)
    state, infos = train.init(params(), **dict(init)), []
    for batch in batches(steps):
        with jax.transfer_guard("allow"):
            placed = train.batch(batch)
        state, info = train.step(state, placed)
        infos.append(info)
    state, last = train.drain(state)
    return state, np.array(jax.device_get([x.loss for x in (*infos, *last)]))


def both(tx, devices=4, *, exact=False, **options):
    """Returns the runs of an unsharded and of a sharded optimizer.

    Both sum gradients in the order of the devices.
    """
    plain = run(tx, devices, all_reduce=collectives.two_shot(), **options)
    return plain, run(tx, devices, shard_optimizer=True, exact=exact, **options)


def assert_close(found, wanted, rounding):
    for a, b in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=rounding)


@grid(
    1,
    name=("sgd", "momentum", "adamw"),
    width=(1, 2, 3),
    devices=(1, 2, 4, 8),
    executor=("fused", "host"),
)
def test_plain_delay_has_the_bits_of_the_unsharded_pipeline(
    name, width, devices, executor
):
    options = {"width": width, "executor": executor, "weight_prediction": False}
    (wanted, losses), (found, others) = both(OPTIMIZERS[name], devices, **options)
    pairs = ((x.params, x.opt_state) for x in (found, wanted))
    assert_bits_equal(*jax.device_get([*pairs]))
    assert_bits_equal(others, losses)


@ONE_PYTHON
@grid(0, width=(2, 1, 3), devices=(4, 2, 8), executor=("host", "fused"))
def test_clipping_by_the_global_norm_is_close_to_unsharded(width, devices, executor):
    options = {"width": width, "executor": executor, "weight_prediction": False}
    tx = OPTIMIZERS["clip+adamw"]
    (wanted, losses), (found, others) = both(tx, devices, **options)
    assert_close(found.params, wanted.params, 1e-5)
    np.testing.assert_allclose(others, losses, rtol=1e-5)


WITH_SUMS = {
    "lamb": optax.lamb(1e-2),
    "fromage": optax.fromage(1e-2),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=128),
}


@ONE_PYTHON
@pytest.mark.parametrize(
    ("name", "predicts"),
    [
        pytest.param("lamb", False, marks=FULL),
        ("adafactor", True),
        pytest.param("lamb", True, marks=FULL),
        pytest.param("adafactor", False, marks=FULL),
        pytest.param("fromage", False, marks=FULL),
        pytest.param("fromage", True, marks=FULL),
    ],
)
def test_optimizers_with_sums_are_close_to_unsharded(name, predicts):
    """Without prediction, they train as in the unsharded pipeline."""
    (wanted, losses), (found, others) = both(
        WITH_SUMS[name], weight_prediction=predicts
    )
    assert np.isfinite(others[1:]).all()
    if not predicts:
        assert_close(found.params, wanted.params, 1e-5)
        np.testing.assert_allclose(others, losses, rtol=1e-5)


def test_single_device_runs_the_unsharded_program():
    def program(**options):
        train = pj.make_train_step(
            loss_fn, OPTIMIZERS["clip+adamw"], mesh=pj.data_mesh(1), **options
        )
        state = train.init(params())
        assert state.gathered is state.params
        return train.lower(state, batches(1)[0]).as_text()

    assert program(shard_optimizer=True) == program()


@ONE_PYTHON
def test_every_device_has_its_piece():
    train = pj.make_train_step(
        loss_fn,
        OPTIMIZERS["adamw"],
        mesh=pj.data_mesh(4),
        shard_optimizer=True,
    )
    state = train.init(params())
    wanted = {"up": P(None, "data"), "bias": P("data"), "down": P("data"), "scale": P()}
    for _ in range(2):
        for tree in (state.params, state.opt_state[0].mu, state.opt_state[0].nu):
            assert {k: x.sharding.spec for k, x in tree.items()} == wanted
        assert state.params["down"].addressable_data(0).shape == (4, 3)
        assert all(x.is_fully_replicated for x in state.gathered.values())
        state, _ = train.step(state, batches(1)[0])
    assert_same_form(state, train.abstract_state(params()))


def assert_same_form(state, shapes):
    assert jax.tree.structure(state) == jax.tree.structure(shapes)
    for leaf, form in zip(*map(jax.tree.leaves, (state, shapes)), strict=True):
        assert (leaf.shape, leaf.dtype) == (form.shape, form.dtype)
        assert leaf.sharding.is_equivalent_to(form.sharding, leaf.ndim)


def full_form(params, batch, *, model_state, rng):
    kept = jax.random.bernoulli(rng, 0.8, batch["x"].shape)
    inputs = jnp.where(kept, batch["x"], jnp.float32(0))
    hidden = jnp.tanh(inputs @ params["up"] + params["bias"][None])
    weights = 1 + (batch["y"][:, 0] > 0).astype(jnp.float32)
    each = jnp.mean((hidden @ params["down"] - batch["y"]) ** 2, axis=1)
    loss = params["scale"] * jnp.sum(weights * each) / jnp.maximum(weights.sum(), 1)
    after = {"mean": 0.9 * model_state["mean"] + 0.1 * hidden.mean(), "count": 1}
    after["count"] = model_state["count"] + 1
    return loss, pj.Aux({"error": each.mean()}, after, weights.sum())


@ONE_PYTHON
@grid(0, width=(2, 1, 3), executor=("host", "fused"), predicted=(True, False))
def test_full_loss_is_close_to_unsharded(width, executor, predicted):
    options = {"width": width, "executor": executor, "weight_prediction": predicted}
    (wanted, losses), (found, others) = both(
        OPTIMIZERS["momentum"], loss=full_form, init=given(), microbatches=2, **options
    )
    assert_close(found.params, wanted.params, 2e-6)
    assert_close(found.model_state, wanted.model_state, 2e-6)
    np.testing.assert_allclose(others, losses, rtol=2e-6)


def given():
    """Returns what a run with everything on board is given at the start."""
    state = {"mean": jnp.float32(0), "count": jnp.int32(0)}
    return {"model_state": state, "rng": jax.random.key(3), "batch": batches(1)[0]}


# tests/train_step/test_switches.py has every switch in the quick run.
SWITCHED = {("guard", "host", 1)}


@pytest.mark.parametrize(
    ("switch", "executor", "width"),
    [
        pytest.param(*case, marks=() if case in SWITCHED else FULL)
        for case in itertools.product(SWITCHES, ("fused", "host"), (2, 1, 3))
    ],
)
def test_jax_switches_change_no_bit(switch, executor, width):
    options = {"loss": full_form, "init": given(), "width": width, "steps": 3}
    options |= {"executor": executor, "shard_optimizer": True, "donate": True}
    # Optax's AdamW multiplies float32 by int32.
    kind = "momentum" if switch == "strict promotion" else "adamw"
    wanted, losses = run(OPTIMIZERS[f"clip+{kind}"], **options)
    with switched(*SWITCHES[switch]):
        found, others = run(OPTIMIZERS[f"clip+{kind}"], **options)
    for name in ("params", "opt_state", "model_state", "gathered", "mean", "slopes"):
        parts = (getattr(state, name) for state in (found, wanted))
        assert_bits_equal(*jax.device_get([*parts]))
    assert np.isfinite(losses[width - 1 :]).all()
    assert_bits_equal(others[width - 1 :], losses[width - 1 :])


@FULL  # in the quick run, tests/train_step/test_switches.py has a step without pieces
@pytest.mark.parametrize("executor", ["fused", "host"])
def test_set_mesh_with_explicit_axes_changes_no_bit(executor):
    explicit = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    options = {"executor": executor, "shard_optimizer": True}
    wanted, losses = run(OPTIMIZERS["adamw"], **options)
    with jax.set_mesh(explicit):
        found, others = run(OPTIMIZERS["adamw"], mesh=explicit, **options)
        assert_bits_equal(jax.device_get(found.params), jax.device_get(wanted.params))
    assert_bits_equal(others, losses)


@ONE_PYTHON
def test_scan_of_steps_is_close_to_a_loop():
    train = pj.make_train_step(
        loss_fn, OPTIMIZERS["adamw"], mesh=pj.data_mesh(4), shard_optimizer=True
    )
    start, data = train.init(params()), batches(4)
    wanted = start
    for batch in data:
        wanted, _ = train.step(wanted, batch)
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *data)
    found, _ = jax.jit(lambda s, xs: jax.lax.scan(train.step, s, xs))(start, stacked)
    assert_close(found.params, wanted.params, 1e-6)


@FULL  # in the quick run, tests/train_step/test_switches.py has a step without pieces
@pytest.mark.parametrize("width", [1, 2])
def test_x64_changes_only_roundings(width):
    options = {"width": width, "shard_optimizer": True}
    wanted, _ = run(OPTIMIZERS["clip+adamw"], **options)
    with jax.enable_x64(True):
        found, _ = run(OPTIMIZERS["clip+adamw"], **options)
    assert found.params["up"].dtype == np.float32
    assert_close(found.params, wanted.params, 1e-6)


@pytest.mark.parametrize("width", [1, 2])
def test_bytes_sent_are_as_in_an_all_reduce(width):
    """The declared bytes are those of the compiled program: as in an all-reduce."""
    train = pj.make_train_step(
        loss_fn,
        OPTIMIZERS["clip+adamw"],
        mesh=pj.data_mesh(4),
        width=width,
        shard_optimizer=True,
        weight_prediction=False,
    )
    state, batch = train.abstract_state(params()), batches(1)[0]
    said = train.transfers(state, batch)
    report = inspect(train, state, jax.eval_shape(lambda: batch))
    assert sum(x.wire_bytes for x in said) == sum(
        x.times * x.wire_bytes for x in report.collectives
    )
    elements = sum(x.size for k, x in params().items() if k != "scale")
    # Beside the halves travel the loss, the gradient of the scale, and 9 numbers: for
    # each of three arrays, whether it is finite, and its squares for the clip and for
    # the reported norm.
    most = 2 * 3 / 4 * 4 * (elements + 1 + 1 + 12)
    assert 2 * 3 / 4 * 4 * elements < sum(x.wire_bytes for x in said) <= most


@grid(1, executor=("fused", "host"), width=(1, 2))
def test_gradient_with_nan_is_skipped(executor, width):
    def bad(params, batch):
        loss = loss_fn(params, batch)
        return jnp.where(batch["x"][0, 0] > 1e6, jnp.nan, 1.0) * loss

    train = pj.make_train_step(
        bad,
        OPTIMIZERS["adamw"],
        mesh=pj.data_mesh(4),
        width=width,
        executor=executor,
        shard_optimizer=True,
        weight_prediction=False,
    )
    good, broken = batches(2)
    broken["x"][8, 0] = 1e7  # on one of the devices
    state = train.init(params())
    state, _ = train.step(state, good)
    state, _ = train.drain(state)
    before = jax.device_get((state.params, state.opt_state))
    state, _ = train.step(state, broken)
    state, _ = train.drain(state)
    assert_bits_equal(jax.device_get((state.params, state.opt_state)), before)
    assert int(state.skipped) == 1
    state, _ = train.step(state, good)
    state, _ = train.drain(state)
    assert not np.array_equal(state.params["up"], before[0]["up"])


@ONE_PYTHON
@grid(0, executor=("host", "fused"), width=(3, 2), predicted=(True, False))
def test_gathered_parameters_equal_the_pieces_after_a_drain(executor, width, predicted):
    state, _ = run(
        OPTIMIZERS["adamw"],
        width=width,
        executor=executor,
        weight_prediction=predicted,
        shard_optimizer=True,
    )
    assert_bits_equal(jax.device_get(state.gathered), jax.device_get(state.params))


@pytest.mark.parametrize("executor", ["fused", pytest.param("host", marks=FULL)])
def test_donation_changes_no_bit(executor):
    options = {"executor": executor, "shard_optimizer": True}
    kept, losses = run(OPTIMIZERS["adamw"], **options)
    given, others = run(OPTIMIZERS["adamw"], donate=True, **options)
    assert_bits_equal(jax.device_get(given.params), jax.device_get(kept.params))
    assert_bits_equal(others, losses)


@FULL  # in the quick run, each executor is compared with the unsharded optimizer
@pytest.mark.parametrize("predicted", [False, True])
def test_both_executors_agree(predicted):
    options = {"shard_optimizer": True, "weight_prediction": predicted, "width": 3}
    fused, losses = run(OPTIMIZERS["clip+adamw"], executor="fused", **options)
    host, others = run(OPTIMIZERS["clip+adamw"], executor="host", **options)
    assert_close(host.params, fused.params, 1e-6)
    np.testing.assert_allclose(others, losses, rtol=1e-6)


@ONE_PYTHON
@pytest.mark.parametrize("width", [2, pytest.param(3, marks=FULL)])
def test_warm_up_is_close_to_unsharded(width):
    options = {"width": width, "warmup_steps": 2}
    (wanted, losses), (found, others) = both(OPTIMIZERS["momentum"], **options)
    assert_close(found.params, wanted.params, 2e-6)
    np.testing.assert_allclose(others, losses, rtol=2e-6)


@ONE_PYTHON
@pytest.mark.parametrize("predicted", [pytest.param(False, marks=FULL), True])
def test_parameters_travel_in_the_compute_dtype(predicted):
    """The loss sees parameters in this dtype in any case."""
    options = {"compute_dtype": jnp.bfloat16, "weight_prediction": predicted}
    (wanted, losses), (found, others) = both(OPTIMIZERS["momentum"], **options)
    assert {x.dtype for x in found.gathered.values()} == {jnp.dtype(jnp.bfloat16)}
    assert {x.dtype for x in found.params.values()} == {jnp.dtype(jnp.float32)}
    if predicted:  # c is rounded before the device's own part is added
        np.testing.assert_allclose(others, losses, rtol=0.02)
    else:
        assert_bits_equal(*jax.device_get([found.params, wanted.params]))
        assert_bits_equal(others, losses)


@ONE_PYTHON
def test_codec_keeps_its_states():
    feedback = codecs.error_feedback(codecs.int8(8))
    options = {"all_reduce": collectives.two_shot(feedback), "shard_optimizer": True}
    state, losses = run(OPTIMIZERS["momentum"], steps=20, **options)
    _, wanted = run(OPTIMIZERS["momentum"], steps=20)
    assert jax.tree.leaves(state.in_flight.codec_states)
    np.testing.assert_allclose(losses[1:], wanted[1:], rtol=0.1)


def test_replicas_are_equal():
    state, _ = run(OPTIMIZERS["adamw"], shard_optimizer=True)
    assert len(set(pj.replica_digest(state).values())) == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"shard_optimizer": 1}, "`shard_optimizer` must be True or False, got 1"),
        (
            {"weight_prediction": "own"},
            "`weight_prediction` must be 'linearized' or False",
        ),
        (
            {"all_reduce": collectives.tree()},
            "`all_reduce` must have two halves with shard_optimizer=True",
        ),
        (
            {
                "all_reduce": collectives.psum(
                    codecs.error_feedback(codecs.power_sgd(1, jax.random.key(0)))
                )
            },
            "`all_reduce` must have two halves with shard_optimizer=True",
        ),
    ],
)
def test_unsupported_options_are_refused(options, said):
    with pytest.raises(ValueError, match=f"^{said}"):
        pj.make_train_step(
            loss_fn,
            OPTIMIZERS["sgd"],
            mesh=pj.data_mesh(4),
            **{"shard_optimizer": True, **options},
        )


def test_host_executor_needs_cpus():
    pytest.importorskip("jax_plugins.xla_cuda12")
    mesh = pj.data_mesh(devices=pj.overlap.topology("h100:1x1x2"))
    with pytest.raises(ValueError, match=r"^`executor` must be 'fused' or 'auto' wi"):
        pj.make_train_step(
            loss_fn,
            OPTIMIZERS["sgd"],
            mesh=mesh,
            executor="host",
            shard_optimizer=True,
        )


def test_drained_states_start_the_other_kind_of_optimizer():
    """A drained state of either kind is a start for the other."""
    for kind in (False, True):
        state, _ = run(OPTIMIZERS["adamw"], shard_optimizer=kind)
        train = pj.make_train_step(
            loss_fn,
            OPTIMIZERS["adamw"],
            mesh=pj.data_mesh(4),
            shard_optimizer=not kind,
        )
        given = state.params, state.opt_state
        if kind:  # an unsharded optimizer refuses arrays that are split over the data
            given = jax.device_get(given)
        other = train.init(given[0], opt_state=given[1])
        assert_bits_equal(jax.device_get(other.params), jax.device_get(state.params))
        other, _ = train.step(other, batches(1)[0])


def grouped(groups, **options):
    """Returns the run of groups that shard the model, and of as many devices alone."""
    sizes = (groups, 2)
    mesh = jax.make_mesh(
        sizes,
        ("host", "fsdp"),
        axis_types=(jax.sharding.AxisType.Auto,) * 2,
        devices=jax.devices()[: 2 * groups],
    )
    split = {"up": P(None, "fsdp"), "bias": P("fsdp"), "down": P("fsdp")}
    place = {k: NamedSharding(mesh, split.get(k, P())) for k in params()}
    runs = []
    for given, sharded in ((pj.data_mesh(groups), False), (mesh, True)):
        train = pj.make_train_step(
            loss_fn,
            mesh=given,
            axis_name="host" if sharded else "data",
            shard_optimizer=True,
            **options,
        )
        # An axis that no group splits divides among the groups.
        start = params(inputs=8, outputs=4)
        start = jax.device_put(start, place) if sharded else start
        state, losses = train.init(start), []
        for batch in wide_batches(6):
            state, info = train.step(state, train.batch(batch))
            losses.append(info.loss)
        drained, _ = train.drain(state)
        runs.append((state, drained, np.array(losses)))
    return runs


def wide_batches(count):
    return normal_batches(count, size=16, inputs=8, outputs=4)


@ONE_PYTHON
@grid(
    0, name=("clip+adamw", "momentum"), groups=(2, 4), width=(2, 1, 3), predicted=(1, 0)
)
def test_groups_shard_the_model_and_the_optimizer(name, groups, width, predicted):
    (_, wanted, losses), (state, found, others) = grouped(
        groups, tx=OPTIMIZERS[name], width=width, weight_prediction=bool(predicted)
    )
    # Groups renew coarse copies of the second moment in another order.
    rounding = 0.01 if predicted and name == "clip+adamw" else 1e-5
    np.testing.assert_allclose(others, losses, rtol=rounding)
    assert_close(found.params, wanted.params, rounding)
    assert state.params["up"].sharding.spec == P("host", "fsdp")
    assert state.params["down"].sharding.spec == P("fsdp", "host")
    assert state.params["bias"].sharding.spec == P("fsdp")
    assert state.gathered["up"].sharding.spec == P(None, "fsdp")


@FULL  # in the quick run, groups have no codec, and a codec has no groups
def test_groups_with_a_codec_are_close_to_unsharded():
    (_, _, losses), (_, _, others) = grouped(
        2,
        tx=OPTIMIZERS["momentum"],
        all_reduce=collectives.two_shot(codecs.error_feedback(codecs.int8(8))),
    )
    np.testing.assert_allclose(others[1:], losses[1:], rtol=0.1)
