"""Tests the residuals of a two-shot exchange against sums by hand."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax import codecs, collectives
from pipejax.collectives import Layout
from pipejax.collectives._residuals import owed, owing
from pipejax.mesh import on_mesh

from ..helpers import assert_bits_equal
from .cases import KEY

DEVICES = 2
# 20 numbers are cut into two pieces of 16, in blocks of 8.
LAYOUT = Layout.of_shapes(((3, 5), (5,)), exact=1)
NOISY = codecs.stochastic(codecs.int8(8), KEY)
FED_BACK = collectives.two_shot(codecs.error_feedback(NOISY))


def on_devices(function, *args):
    """Calls `function` with each device's rows of the arguments, and returns rows."""

    def local(rows):
        out = function(*jax.tree.map(lambda x: x[0], rows))
        return jax.tree.map(lambda x: x[None], out)

    mapped = on_mesh(local, pj.data_mesh(DEVICES), P("data"), P("data"))
    return jax.tree.map(np.asarray, jax.jit(mapped)(args))


def states(scatter, gather):
    """Returns the states of both devices with the given residuals."""
    found = on_devices(lambda _: FED_BACK(LAYOUT, "data").init(), np.zeros(DEVICES))
    found["scatter"] = found["scatter"]._replace(residual=scatter)
    found["gather"] = found["gather"]._replace(residual=gather)
    return found


def residuals():
    """Returns residuals of both places on each device: integers, with exact sums."""
    rng = np.random.default_rng(0)
    scatter = rng.integers(-99, 99, (DEVICES, DEVICES, 16)).astype(np.float32)
    return scatter, rng.integers(-99, 99, (DEVICES, 16)).astype(np.float32)


def arrays(vector):
    """Returns 20 numbers in the shapes of the layout."""
    return vector[:15].reshape(3, 5), vector[15:20]


def test_both_places_are_owed():
    """A device owes the residuals of its pieces and of the sum that it owns."""
    scatter, gather = residuals()
    kept = states(scatter, gather)
    got = on_devices(lambda own: owed(FED_BACK, LAYOUT, "data", own), kept)
    total = scatter.sum(axis=0).reshape(-1) + gather.reshape(-1)
    wanted = [np.stack([x] * DEVICES) for x in arrays(total)]
    assert_bits_equal(list(got), wanted)


def test_what_is_to_be_owed_lies_where_gradients_are_encoded():
    """`owing` replaces all residuals and keeps the keys of the inner codecs."""
    before = states(*residuals())
    vectors = np.arange(2 * 20, dtype=np.float32).reshape(DEVICES, 20)
    after = on_devices(
        lambda own, vector: owing(FED_BACK, LAYOUT, "data", own, arrays(vector)),
        before,
        vectors,
    )
    padded = np.pad(vectors, ((0, 0), (0, 12))).reshape(DEVICES, DEVICES, 16)
    assert_bits_equal(after["scatter"].residual, padded)
    assert_bits_equal(after["gather"].residual, np.zeros((DEVICES, 16), np.float32))
    for place in ("scatter", "gather"):
        assert_bits_equal(after[place].codec, before[place].codec)


def test_nothing_is_owed_where_nothing_is_fed_back():
    """The keys of a codec without feedback are not residuals, and are not changed."""
    plain = collectives.two_shot(NOISY)
    kept = on_devices(lambda _: plain(LAYOUT, "data").init(), np.zeros(DEVICES))
    got = on_devices(lambda own: owed(plain, LAYOUT, "data", own), kept)
    assert not any(x.any() for x in got)
    ones = jnp.ones((DEVICES, 20))
    after = on_devices(
        lambda own, vector: owing(plain, LAYOUT, "data", own, arrays(vector)),
        kept,
        ones,
    )
    assert_bits_equal(after, kept)
