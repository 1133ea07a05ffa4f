"""Tests on which devices codec states can be used again."""

import functools
import json

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax.checkpoint._spread import Spread

from .runs import ALL_REDUCES

FULL = pytest.mark.full


@functools.cache
def on(mesh, axis_name, name=None, split=None):
    """Returns a train step on a mesh, and the spread of a state after a step."""
    train = pj.make_train_step(
        lambda params, batch: jnp.mean(batch @ params),
        optax.sgd(0.5),
        mesh=mesh,
        axis_name=axis_name,
        all_reduce=ALL_REDUCES[name] if name else pj.collectives.psum(),
    )
    given = jax.device_put(jnp.zeros((4, 4)), NamedSharding(mesh, split or P()))
    state, _ = train.step(train.init(given), jnp.ones((24, 4)))
    spread = Spread.of(state)
    assert spread == Spread.now(train, jax.eval_shape(lambda: state))
    # A checkpoint holds a spread as JSON.
    return train, Spread(**json.loads(json.dumps(spread._asdict())))


def same(before, now):
    phases = now[0].phases
    return before[1].same_codecs(now[1], *(phase.all_reduce for phase in phases))


def hosts(count, number, names=("host", "device")):
    return pj.data_mesh(count * number, axis_name=names, hosts=count), names


@pytest.mark.parametrize(
    "name", ["psum, power_sgd", pytest.param("ring, stochastic", marks=FULL)]
)
def test_renamed_axes_count_as_the_same_devices(name):
    before = on(pj.data_mesh(4), "data", name)
    assert same(before, on(pj.data_mesh(4, axis_name="batch"), "batch", name))
    assert same(before, on(*hosts(2, 2), name))
    assert not same(before, on(pj.data_mesh(2), "data", name))


@pytest.mark.full
def test_axes_of_a_hierarchical_all_reduce_are_told_apart():
    before = on(*hosts(2, 4), "hierarchical")
    assert same(before, on(*hosts(2, 4), "hierarchical"))
    assert not same(before, on(*hosts(4, 2), "hierarchical"))
    # Ranks are counted along the axes in their order.
    mesh, _ = hosts(2, 4)
    assert not same(before, on(mesh, ("device", "host"), "hierarchical"))


@pytest.mark.filterwarnings("ignore:nothing is split over the mesh axis 'model'")
def test_other_inner_axes_count_as_other_shards():
    mesh = pj.data_mesh(8, axis_name=("data", "model"), hosts=4)
    train, inside = on(mesh, "data", "psum, power_sgd")
    assert inside == Spread(4, [["model", 2]], [[]], [["data", 4], ["model", 2]], 4)
    assert not same(on(pj.data_mesh(4), "data", "psum, power_sgd"), (train, inside))


def test_parameters_split_along_another_axis_count_as_other_shards():
    mesh = pj.data_mesh(4, axis_name=("data", "model"), hosts=2)
    rows = on(mesh, "data", "two_shot", P("model"))
    columns = on(mesh, "data", "two_shot", P(None, "model"))
    assert rows[1].split == [[["model"]]]
    assert columns[1].split == [[[], ["model"]]]
    assert not same(rows, columns)


def test_another_codec_does_not_count_as_other_devices():
    """The states then have other names, and the comparison of all leaves says so."""
    plain, coded = on(pj.data_mesh(4), "data"), on(pj.data_mesh(4), "data", "two_shot")
    assert (plain[1].codecs, coded[1].codecs) == (None, [["data", 4]])
    assert same(plain, coded)
    assert same(coded, plain)
    assert not same(plain, on(pj.data_mesh(2), "data", "two_shot"))
