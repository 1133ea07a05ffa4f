"""Tests the warning of inner axes along which all devices compute the same."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax._core.step import Inputs, InputSpecs
from pipejax._core.step._check_inner import warn_of_unused_axes
from pipejax._core.step._loss import full_form
from pipejax._internal.mesh import on_mesh
from pipejax._internal.shards import Shards

WHOLE = P()


def said(loss_fn, *, params=WHOLE, batch=WHOLE, inner=("fsdp", "tp")):
    """Returns the warnings of a program on two groups."""
    auto = (jax.sharding.AxisType.Auto,) * 3
    sizes = (2, 2, 2 if len(inner) > 1 else 1)
    mesh = jax.make_mesh(
        sizes,
        ("host", "fsdp", "tp"),
        axis_types=auto,
        devices=jax.devices()[: np.prod(sizes)],
    )

    def local(w, x):
        shards = Shards(params=(params,))
        full, given = full_form(loss_fn, None), Inputs(x, specs=InputSpecs((batch,)))
        warn_of_unused_axes(full, {"w": w}, None, None, given, shards)
        return x

    program = jax.jit(on_mesh(local, mesh, (P(), P("host")), P("host"), "host"))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        program(jnp.ones((4, 4)), jnp.ones((8, 4)))
    return [str(each.message) for each in found]


def plain(params, batch):
    return jnp.mean(batch @ params["w"])


def splitting(params, batch):
    return plain(params, jax.lax.with_sharding_constraint(batch, P("tp")))


def test_unused_inner_axes_are_named():
    (both,) = said(plain)
    assert both.startswith("nothing is split over the mesh axis 'fsdp', 'tp': neither")
    (tp,) = said(plain, params=P("fsdp"))
    assert tp.startswith("nothing is split over the mesh axis 'tp': neither")


@pytest.mark.parametrize(
    ("loss_fn", "specs"),
    [
        (plain, {"params": P("fsdp", "tp")}),
        (plain, {"params": P("fsdp"), "batch": P("tp")}),
        (splitting, {"batch": P("fsdp")}),
        (plain, {"params": P("fsdp"), "inner": ("fsdp",)}),
    ],
    ids=["parameters", "batch", "loss", "size 1"],
)
def test_used_inner_axes_are_not_named(loss_fn, specs):
    assert said(loss_fn, **specs) == []


def test_no_warning_is_given_without_inner_axes():
    train = pj.make_train_step(
        lambda w, batch: jnp.mean((w - batch) ** 2),
        optax.sgd(0.1),
        mesh=pj.data_mesh(2),
    )
    train.step(train.init(jnp.float32(1)), np.zeros(4, np.float32))


@pytest.mark.parametrize("width", [1, 2])
def test_unused_axis_with_a_sharded_optimizer_warns(width):
    """The loss is read with the whole parameters, of which a device has pieces."""
    mesh = pj.data_mesh(4, axis_name=("host", "fsdp"), hosts=2)
    train = pj.make_train_step(
        plain,
        optax.adam(0.1),
        mesh=mesh,
        axis_name="host",
        width=width,
        shard_optimizer=True,
    )
    state = train.init({"w": jnp.ones((4, 4))})
    with pytest.warns(UserWarning, match="nothing is split over the mesh axis 'fsdp'"):
        train.step(state, np.ones((8, 4), np.float32))
