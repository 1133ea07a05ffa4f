"""Tests the messages for bad arguments of `make_train_step`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pipejax as pj

from ...helpers import batches, init_params, loss_fn
from ...train_step.refusals import make, refused


@pytest.mark.parametrize("width", [0, -1, True, False, 2.0, 1.5, "2", None, [2]])
def test_width_must_be_an_integer_of_at_least_1(width):
    message = r"`width` must be an integer of at least 1, got .* 1 is synchronous"
    with refused(message):
        make(width=width)
    with refused(message):
        pj.pipelined_mean("data", width=width)


def test_width_may_be_a_numpy_integer():
    assert make(width=np.int64(3)).width == 3


@pytest.mark.parametrize("steps", [-1, 1.0, True, "3"])
def test_warmup_steps_must_be_an_integer_of_at_least_0(steps):
    with refused(r"`warmup_steps` must be an integer of at least 0, got "):
        make(warmup_steps=steps)


@pytest.mark.parametrize("parts", [0, -2, 2.0, True])
def test_microbatches_must_be_an_integer_of_at_least_1(parts):
    with refused(r"`microbatches` must be an integer of at least 1, got "):
        make(microbatches=parts)


@pytest.mark.parametrize("name", ["compute_dtype", "reduce_dtype"])
@pytest.mark.parametrize("dtype", [jnp.int8, "int32", bool, jnp.complex64])
def test_dtypes_must_be_floating_or_none(name, dtype):
    with refused(rf"`{name}` must be a floating dtype or None, got .* jnp.bfloat16"):
        make(**{name: dtype})


@pytest.mark.parametrize("wrong", [None, "psum", 3])
def test_all_reduce_must_be_an_algorithm(wrong):
    with refused(rf"`all_reduce` must be an algorithm .* got {wrong!r}"):
        make(all_reduce=wrong)


@pytest.mark.parametrize("tx", [optax.sgd, None, 0.1])
def test_tx_must_be_a_gradient_transformation(tx):
    with refused(r"`tx` must be an optax.GradientTransformation, .* optax.sgd\(0.1\)"):
        make(tx=tx)


@pytest.mark.parametrize(
    "axis_name", [None, (), 0, ["data"], ("data", None), ("data", "data")]
)
def test_axis_name_must_be_a_name_or_distinct_names(axis_name):
    message = "`axis_name` must be the name of a mesh axis, or a tuple of distinct"
    with refused(message):
        make(axis_name=axis_name)
    with refused(message):
        pj.pipelined_mean(axis_name)


def test_mesh_must_have_the_axis():
    mesh = jax.make_mesh((2,), ("batch",))
    message = r"`mesh` must have the axis 'data', got the axes \('batch',\).*axis_name"
    with refused(message):
        make(mesh=mesh)
    assert make(mesh=mesh, axis_name="batch").axis_name == "batch"


def test_mesh_must_have_devices_of_every_process(monkeypatch):
    """The program would run, and fail where the process reads the loss."""
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    with refused("`mesh` must have devices of all 3 processes .* none of process 1, 2"):
        make()
    (absent,) = pj.overlap.topology("h100:1x1x1")
    assert make(mesh=pj.data_mesh(devices=[absent])).width == 2


@pytest.mark.parametrize("mesh", [None, 2, jax.devices])
def test_mesh_must_be_a_jax_mesh(mesh):
    with refused(r"`mesh` must be a jax.sharding.Mesh, got \w+. Use pj.data_mesh\(\)"):
        make(mesh=mesh)


@pytest.mark.parametrize("value", ["linear", 1, 0, None])
def test_weight_prediction_must_be_a_known_rule(value):
    with refused("`weight_prediction` must be 'linearized', 'own' or False, got"):
        make(weight_prediction=value)


@dataclasses.dataclass
class Plain:
    """An optimizer that has no hash."""

    rate: float

    def init(self, params):
        del params
        return ()

    def update(self, gradients, state, params=None):
        del params
        return jax.tree.map(lambda g: -self.rate * g, gradients), state


def test_optimizer_without_a_hash_trains():
    mesh = pj.data_mesh(2)
    train = pj.make_train_step(loss_fn, Plain(0.1), mesh=mesh)
    state, _ = train.step(train.init(init_params()), batches(1)[0])
    train.drain(state)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"donate": "False"}, "`donate` must be True or False"),
        ({"width": 1, "warmup_steps": -3}, "`warmup_steps` must be an integer"),
    ],
)
def test_settings_without_effect_are_checked_too(settings, says):
    with pytest.raises(ValueError, match=says):
        pj.make_train_step(loss_fn, optax.sgd(0.1), mesh=pj.data_mesh(2), **settings)
