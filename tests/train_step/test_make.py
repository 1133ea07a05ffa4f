"""Tests the settings of `make_train_step`, and the recursion that it promises."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pipejax as pj
from pipejax import collectives

from ..helpers import assert_bits_equal, batches, init_params, loss_fn


def settings_of(train):
    """Returns the settings of a train step by the names of the arguments."""
    local = train.settings
    return {
        "loss_fn": local.loss_fn,
        "tx": local.tx,
        "mesh": train.mesh,
        "width": train.width,
        "phases": (train.boundaries, train.earlier),
        "microbatches": local.microbatches,
        "compute_dtype": local.compute_dtype,
        "reduce_dtype": local.reduce_dtype,
        "axis_name": (train.axis_name, local.axis_name),
        "donate": train.config.donate,
        "all_reduce": train.config.all_reduce,
        "weight_prediction": local.weight_prediction,
        "executor": train.executor_name,
        "skip_nonfinite": local.skip_nonfinite,
    }


TX, MESH = optax.sgd(0.1), pj.data_mesh(2)
DEFAULTS = {
    "loss_fn": loss_fn,
    "tx": TX,
    "mesh": MESH,
    "width": 2,
    "phases": ((), ()),
    "microbatches": 1,
    "compute_dtype": None,
    "reduce_dtype": None,
    "axis_name": ("data", "data"),
    "donate": False,
    "all_reduce": collectives.psum(),
    "weight_prediction": "linearized",
    "executor": "auto",
    "skip_nonfinite": True,
}


def test_defaults_equal_the_documented_settings():
    train = pj.make_train_step(loss_fn, TX, mesh=MESH)
    assert settings_of(train) == DEFAULTS


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("width", 3),
        ("microbatches", 5),
        ("compute_dtype", jnp.bfloat16),
        ("reduce_dtype", jnp.bfloat16),
        ("donate", True),
        ("weight_prediction", False),
        ("weight_prediction", "own"),
        ("executor", "host"),
        ("skip_nonfinite", False),
    ],
)
def test_each_argument_changes_one_setting(name, value):
    train = pj.make_train_step(loss_fn, TX, mesh=MESH, **{name: value})
    assert settings_of(train) == DEFAULTS | {name: value}


def test_weight_prediction_true_is_the_default_rule():
    train = pj.make_train_step(loss_fn, TX, mesh=MESH, weight_prediction=True)
    assert settings_of(train) == DEFAULTS


def test_last_algorithm_of_a_schedule_is_the_one_of_the_step():
    algorithms = collectives.psum(combine_threshold_bytes=8), collectives.ring()
    schedule = collectives.scheduled(algorithms, [3])
    train = pj.make_train_step(loss_fn, TX, mesh=MESH, all_reduce=schedule)
    assert train.boundaries == (3,)
    first, last = (*train.earlier, train.config)
    assert (first.all_reduce.all_reduce, last.all_reduce.all_reduce) == algorithms
    assert (first.width, last.width) == (2, 2)


def test_warm_up_is_a_phase_of_width_1():
    train = pj.make_train_step(loss_fn, TX, mesh=MESH, warmup_steps=4)
    (first,) = train.earlier
    assert train.boundaries == (4,)
    assert (first.width, train.width) == (1, 2)
    assert first.all_reduce is train.config.all_reduce
    synchronous = pj.make_train_step(loss_fn, TX, mesh=MESH, width=1, warmup_steps=4)
    assert (synchronous.boundaries, synchronous.earlier) == ((), ())


def test_warm_up_and_schedule_share_their_phases():
    algorithms = collectives.psum(combine_threshold_bytes=8), collectives.ring()
    schedule = collectives.scheduled(algorithms, [3])
    train = pj.make_train_step(
        loss_fn, TX, mesh=MESH, all_reduce=schedule, warmup_steps=5
    )
    phases = [(x.width, x.all_reduce.number) for x in (*train.earlier, train.config)]
    assert (train.boundaries, phases) == ((3, 5), [(1, 0), (1, 1), (2, 1)])
    plain = (*train.plain.earlier, train.plain.config)
    phases = [(x.width, x.all_reduce.number) for x in plain]
    assert (train.plain.boundaries, phases) == ((3,), [(1, 0), (1, 1)])


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        # Half of the parameter is taken off at once, one step later, or two steps
        # later.
        ({"width": 1}, [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32]),
        ({"width": 2}, [1, 1 / 2, 1 / 4, 1 / 8, 1 / 16]),
        ({"width": 3}, [1, 1, 1 / 2, 1 / 4, 1 / 8]),
        # Half of the parameter of one step before, or of two steps before, is taken
        # off.
        ({"width": 2, "weight_prediction": False}, [1, 1 / 2, 0, -1 / 4, -1 / 4]),
        ({"width": 3, "weight_prediction": False}, [1, 1, 1 / 2, 0, -1 / 2]),
    ],
)
def test_recursion_equals_numbers_by_hand(settings, wanted):
    """The gradient of `w^2 / 2` is w. Training starts at 1, with a rate of 1/2."""

    def half_square(w, batch):
        return 0.5 * jnp.mean((w - batch) ** 2)

    train = pj.make_train_step(half_square, optax.sgd(0.5), mesh=MESH, **settings)
    state, found = train.init(np.float32(1)), []
    for _ in wanted:
        state, _ = train.step(state, np.zeros(4, np.float32))
        found.append(float(state.params))
    assert found == wanted


AUTO = 2 * (jax.sharding.AxisType.Auto,)


@pytest.mark.filterwarnings("ignore:nothing is split over the mesh axis 'model'")
def test_replicas_along_another_axis_change_no_bit():
    """Replicas along the other axis do the same, and the mean does not count them."""

    def trained(mesh):
        train = pj.make_train_step(loss_fn, optax.sgd(0.1), mesh=mesh, width=2)
        state = train.init(init_params())
        for batch in batches(3):
            state, _ = train.step(state, batch)
        return state

    state = trained(jax.make_mesh((2, 2), ("data", "model"), axis_types=AUTO))
    assert_bits_equal(state.params, trained(pj.data_mesh(2)).params)
    assert len(set(pj.replica_digest(state).values())) == 1


def test_twin_of_one_phase_has_one_phase():
    train = pj.make_train_step(loss_fn, TX, mesh=MESH)
    assert (train.plain.width, train.plain.boundaries) == (1, ())


@pytest.mark.parametrize(
    ("axes", "settings", "logs"),
    [
        ("data", {}, True),
        ("data", {"width": 1}, False),
        ("data", {"weight_prediction": False}, False),
        ("data", {"at_once": pj.codecs.power_sgd(4, jax.random.key(0))}, False),
        (("host", "device"), {}, False),
    ],
)
def test_many_devices_with_predictions_of_their_own_are_logged(
    caplog, axes, settings, logs
):
    chips = pj.overlap.topology("h100:1x4x8")
    mesh = pj.data_mesh(devices=chips, axis_name=axes)
    pj.make_train_step(loss_fn, TX, mesh=mesh, axis_name=axes, **settings)
    said = [x.getMessage() for x in caplog.records if "share a batch" in x.message]
    assert len(said) == logs
    assert all(text.startswith("32 devices or groups predict") for text in said)
