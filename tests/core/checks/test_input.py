"""Tests the messages for bad arguments of `init` and bad batches."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pipejax as pj

from ...helpers import batches, init_params, loss_fn
from ...train_step.refusals import BATCH, make, refused


def test_integer_parameters_are_refused():
    params = init_params() | {"table": {"index": np.arange(3)}}
    message = (
        r"`params` must be floating arrays, got `params\['table'\]\['index'\]` of"
        r" dtype int\d+, which has no gradient. Keep it in `model_state`"
    )
    with refused(message):
        make().init(params)


def test_init_on_absent_devices_is_refused():
    """A state cannot be placed there, and JAX itself ends with a segmentation fault."""
    pytest.importorskip("jax_cuda12_plugin")
    mesh = pj.data_mesh(devices=pj.overlap.topology("h100:1x1x2"))
    train = pj.make_train_step(loss_fn, optax.sgd(0.1), mesh=mesh)
    message = (
        r"`mesh` must be of devices that are attached, .* got 2 x NVIDIA H100.* that"
        r" programs can only be compiled for. .*`train.abstract_state\(params\)`"
    )
    with refused(message):
        train.init(init_params())
    assert jax.eval_shape(train.init, init_params()).step.shape == ()


@pytest.mark.parametrize("dtype", [np.bool_, np.complex64])
def test_bool_and_complex_parameters_are_refused(dtype):
    with refused(rf"`params` must be floating arrays, .* of dtype {np.dtype(dtype)}"):
        make().init({"w": np.ones(3, dtype)})


NOT_TRAINABLE = {
    "complex64": (
        np.ones(2, np.complex64),
        "of dtype complex64, whose gradient .* Split it into two real leaves, its real"
        r" and its imaginary part, .* `jax.lax.complex\(real, imag\)`",
    ),
    "a Python complex": (1j, "of dtype complex64, .* two real leaves"),
    "float8": (
        jnp.ones(2, jnp.float8_e4m3fn),
        "of dtype float8_e4m3fn, in which small updates are lost. Keep it in float32",
    ),
    "float4": (
        jnp.ones(2, jnp.float4_e2m1fn),
        "of dtype float4_e2m1fn, in which small updates are lost",
    ),
    "key": (
        jax.random.key(0),
        "of dtype key<fry>, a PRNG key. Give it to `train.init` as `rng` or in",
    ),
    "masked": (np.ma.masked_array(np.ones(2)), "a masked array, whose mask"),
    "strings": (np.array(["a"]), "an array of dtype <U1. Keep what is no array"),
}


@pytest.mark.parametrize("kind", NOT_TRAINABLE)
def test_parameters_of_other_kinds_are_refused(kind):
    leaf, said = NOT_TRAINABLE[kind]
    with refused(rf"`params` must be floating arrays, got `params\['w'\]`,? {said}"):
        make().init({"w": leaf})


def test_fp8_scales_among_the_parameters_are_refused():
    params = {"params": init_params(), "_overwrite_with_gradient": {"scale": 1.0}}
    message = (
        r"`params` must not hold the collection `_overwrite_with_gradient` of Flax, .*"
        r" got `params\['_overwrite_with_gradient'\]\['scale'\]`. Give it to"
        r" `train.init` as `model_state`, and return its gradient"
    )
    with refused(message):
        make().init(params)


@pytest.mark.parametrize("params", [{}, None, []])
def test_empty_parameters_are_refused(params):
    with refused("`params` must hold at least one array, got none"):
        make().init(params)


@pytest.mark.parametrize("leaf", [jax.nn.relu, jnp.sin, "relu", object()])
def test_parameters_other_than_arrays_are_refused(leaf):
    message = r"got `params\['act'\]`, a \w+. Keep .* eqx.partition\(model"
    with refused(message):
        make().init(init_params() | {"act": leaf})


@pytest.mark.parametrize("name", ["params", "model_state", "opt_state"])
def test_input_sharded_over_the_data_axis_is_refused(name):
    mesh = pj.data_mesh(2)
    sharded = jax.device_put({"w": jnp.ones(4)}, NamedSharding(mesh, P("data")))
    given = {"params": {"w": jnp.ones(4)}, name: sharded}
    message = rf"`{name}\['w'\]` must be replicated on a mesh whose axes all share"
    with refused(message):
        make(lambda params, batch, *, model_state=None: 0.0).init(**given)


def with_keywords(params, batch, *, model_state, rng):
    del rng
    return loss_fn(params, batch), pj.Aux(model_state=model_state)


@pytest.mark.parametrize(
    ("name", "other"),
    [("rng", {"model_state": {"n": np.zeros(1)}}), ("model_state", {"rng": 0})],
)
def test_keywords_of_the_loss_must_be_given_to_init(name, other):
    if "rng" in other:
        other = {"rng": jax.random.key(other["rng"])}
    with refused(rf"`{name}` must be given to `train.init`, because `loss_fn`"):
        make(with_keywords).init(init_params(), **other)


@pytest.mark.parametrize("name", ["rng", "model_state"])
def test_keywords_unknown_to_the_loss_are_refused(name):
    given = {name: jax.random.key(0)}
    message = rf"`loss_fn` must take the keyword `{name}`, .* Add `\*, {name}` to its"
    with refused(message):
        make().init(init_params(), **given)
    make(lambda params, batch, **_: 0.0).init(init_params(), **given)


@pytest.mark.parametrize("call", ["init", "step", "lower"])
@pytest.mark.parametrize(
    ("size", "microbatches"), [(15, 1), (16, 3), (2, 2), (0, 1), (0, 2)]
)
def test_batch_size_must_divide_among_devices_and_microbatches(
    size, microbatches, call
):
    train = make(microbatches=microbatches)
    state = train.init(init_params())
    (batch,) = batches(1, size)
    message = (
        rf"`batch` must divide .* a global batch of {size} is no positive multiple of 2"
        rf" devices x {microbatches} microbatches = {2 * microbatches}. Drop the"
        r" remainder"
    )
    with refused(message):
        if call == "init":
            train.init(init_params(), batch=batch)
        else:
            getattr(train, call)(state, batch)


@pytest.mark.parametrize(
    "batch",
    [
        {},
        None,
        BATCH | {"scale": np.float32(1)},
        BATCH | {"x": BATCH["x"][:8]},
        BATCH | {"scale": 0.5},
    ],
)
def test_batch_without_a_common_axis_is_refused(batch):
    """Parameters of a teacher, which change, are no part of a batch."""
    train = make()
    message = (
        r"`batch` must hold arrays with one common leading axis, the examples; got"
        r" shapes .* `train.step\(state, batch, shared=...\)`.* a row for each device"
    )
    with refused(message):
        train.step(train.init(init_params()), batch)
