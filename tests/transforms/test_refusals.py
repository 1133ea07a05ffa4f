"""Tests the messages for gradients that several transforms refuse."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import pipejax as pj

from ..helpers import init_params, loss_fn
from ..train_step.refusals import BATCH, refused


def on_mesh(tx, f, *, check_vma=False, axis="data"):
    """Calls `f(tx, state, params, batch)` inside `shard_map`, with a new state."""
    params = jax.tree.map(jnp.asarray, init_params())
    mesh = pj.data_mesh(2, axis_name=axis)

    def local(params, batch):
        return f(tx, tx.init(params), params, batch)[0]

    return jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(P(), P(axis)),
            out_specs=P(),
            check_vma=check_vma,
        )
    )(params, BATCH)


@pytest.mark.parametrize(
    "tx",
    [
        pj.pipelined(optax.sgd(0.1), "data"),
        pj.pipelined_mean("data"),
        pj.transforms.compress(pj.codecs.bf16()),
        pj.transforms.delay_robust(0.9, 2),
        pj.transforms.extrapolate_updates(1),
    ],
    ids=["pipelined", "pipelined_mean", "compress", "delay_robust", "extrapolate"],
)
@pytest.mark.parametrize("dtype", ["int32", "bool"])
def test_integer_leaves_are_refused(tx, dtype):
    """Their mean over devices would be rounded to whole numbers."""
    whole = {"w": jnp.ones(2), "n": jnp.ones(2, dtype)}
    state = jax.eval_shape(tx.init, jax.tree.map(jnp.float32, whole))
    with refused(rf"`params` must be floating .* `params\['n'\]` of dtype {dtype}"):
        tx.init(whole)
    with refused(rf"`updates` must be floating .* `updates\['n'\]` of dtype {dtype}"):
        jax.eval_shape(tx.update, whole, state)


def gradients_of(params, batch):
    return jax.grad(loss_fn)(params, batch)


def test_unbound_axis_is_refused():
    message = (
        r"`axis_name` must be an axis of the surrounding shard_map or pmap, got 'data',"
        r" .* Call this inside jax.shard_map over a mesh with the axis 'data'"
    )
    tx, params = pj.pipelined_mean("data"), init_params()
    with refused(message):
        tx.update(params, tx.init(params))
    with refused(message):
        jax.jit(tx.update)(params, tx.init(params))
    with refused(message):
        on_mesh(tx, lambda tx, s, p, b: tx.update(gradients_of(p, b), s), axis="rows")


@pytest.mark.parametrize(
    "change",
    [
        lambda g: {name: g[name] for name in ("hidden", "bias")},
        lambda g: g | {"more": g["out"]},
        lambda g: g | {"out": g["out"].T},
        lambda g: g | {"bias": g["bias"][:, None]},
        lambda g: (g["hidden"], g["bias"], g["out"]),
    ],
)
def test_gradients_of_another_structure_are_refused(change):
    message = (
        r"gradients must have the structure and shapes of the parameters: got .* for"
        r" .* Take them with jax.grad with respect to the same pytree"
    )
    with refused(message):
        on_mesh(
            pj.pipelined_mean("data"),
            lambda tx, s, p, b: tx.update(change(gradients_of(p, b)), s, p),
        )


def test_gradients_already_summed_are_refused():
    message = (
        r"gradients must differ between the devices of 'data', got gradients that"
        r" jax.grad has already summed .*jax.lax.pcast\(params, 'data', to='varying'\)`"
        r", or pass `check_vma=False`"
    )
    tx = pj.pipelined_mean("data")
    with refused(message):
        on_mesh(
            tx, lambda tx, s, p, b: tx.update(gradients_of(p, b), s), check_vma=True
        )

    def remedied(tx, state, params, batch):
        varying = lax.pcast(params, "data", to="varying")
        return tx.update(gradients_of(varying, batch), state)

    on_mesh(tx, remedied, check_vma=True)


def test_gradients_summed_over_one_of_two_axes_are_refused():
    mesh = jax.make_mesh((2, 2), ("host", "device"), axis_types=(AxisType.Auto,) * 2)
    tx, params = pj.pipelined_mean(("host", "device")), init_params()

    def local(params, batch):
        of_hosts = lax.pcast(params, "host", to="varying")
        return tx.update(gradients_of(of_hosts, batch), tx.init(params))[0]

    with refused(r"gradients must differ between the devices of 'device', got"):
        jax.jit(
            jax.shard_map(
                local, mesh=mesh, in_specs=(P(), P(mesh.axis_names)), out_specs=P()
            )
        )(params, BATCH)


@pytest.mark.parametrize(
    "other",
    [
        lambda params: pj.pipelined_mean("data", width=3).init(params),
        lambda params: pj.pipelined_mean("data", width=1).init(params),
        lambda params: pj.pipelined_mean("data").init({"out": params["out"]}),
        lambda params: pj.pipelined_mean("data", reduce_dtype="bfloat16").init(params),
    ],
)
def test_pipeline_state_of_another_form_is_refused(other):
    message = (
        r"`state` must come from `init` of the same width and parameters: width 2 with"
        r" gradients .*'bias'.* in flight, got width \d with .* Call `init` again"
    )
    with refused(message):
        on_mesh(
            pj.pipelined_mean("data"),
            lambda tx, s, p, b: tx.update(gradients_of(p, b), other(p)),
        )


def test_partly_summed_gradients_are_refused():
    def update(tx, state, params, batch):
        cast = params | {"out": lax.pcast(params["out"], "data", to="varying")}
        return tx.update(gradients_of(cast, batch), state)

    with refused(r"gradients must differ between .*: `gradients\['bias'\]`"):
        on_mesh(pj.pipelined_mean("data"), update, check_vma=True)
