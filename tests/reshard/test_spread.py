"""Tests which devices count as the same, and which are refused."""

import functools

import optax
import pytest

import pipejax as pj
from pipejax.reshard import Spread

from ..helpers import batches
from .runs import ALL_REDUCES, HIERARCHICAL, RATE, linear, params, run

FULL = pytest.mark.full


@functools.cache
def on(mesh, axis_name, name):
    """Returns a train step on a mesh, and a state after some steps."""
    train = pj.make_train_step(
        linear,
        optax.sgd(RATE),
        mesh=mesh,
        axis_name=axis_name,
        all_reduce=(ALL_REDUCES | HIERARCHICAL)[name],
    )
    return train, run(train, train.init(params()), batches(3, size=24))


@pytest.mark.parametrize(
    "name", ["psum, power_sgd", pytest.param("ring, stochastic", marks=FULL)]
)
@pytest.mark.parametrize("axis_name", ["batch", ("host", "device")])
def test_axes_of_other_names_are_no_other_devices(axis_name, name):
    _, state = on(pj.data_mesh(4), "data", name)
    train, other = on(pj.data_mesh(4, axis_name=axis_name), axis_name, name)
    assert Spread.of(state).same_as(Spread.of(other), train)
    assert Spread.of(other) == Spread.now(train, other)


@pytest.mark.filterwarnings("ignore:nothing is split over the mesh axis 'model'")
def test_codecs_on_other_inner_axes_are_those_of_other_shards():
    _, state = on(pj.data_mesh(4), "data", "psum, power_sgd")
    inner = pj.data_mesh(8, axis_name=("data", "model"), hosts=4)
    train, other = on(inner, "data", "psum, power_sgd")
    assert Spread.of(other) == Spread.now(train, other)
    assert Spread.of(other) == Spread(4, {"data": 4}, {"model": 2})
    with pytest.raises(ValueError, match=r"must have the inner axes \{\} of the check"):
        Spread.of(state).same_as(Spread.of(other), train)


def test_axes_that_an_all_reduce_tells_apart_keep_their_names():
    before, now = ("a", "b"), ("host", "device")
    _, state = on(pj.data_mesh(4, axis_name=before, hosts=2), before, "outer")
    train, other = on(pj.data_mesh(4, axis_name=now, hosts=2), now, "outer")
    with pytest.raises(ValueError, match=r"`train` must have the axes \('a', 'b'\)"):
        Spread.of(state).same_as(Spread.of(other), train)
