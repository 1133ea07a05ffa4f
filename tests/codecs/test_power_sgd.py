"""Tests PowerSGD on matrices with known singular values."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipejax import codecs as c

from ..grid import grid
from ..helpers import assert_bits_equal
from .conformance import CODECS, KEY, MAX, SHAPES, N, normal

SIDES = SHAPES[0]
SIZE = math.prod(SIDES)


def matrix(*singular_values, seed=0):
    """Returns a 16 x 12 matrix with these singular values, as a vector."""
    rng = np.random.default_rng(seed)
    u, v = (
        np.linalg.qr(rng.normal(size=(side, len(singular_values))))[0] for side in SIDES
    )
    return (u * np.array(singular_values) @ v.T).astype(np.float32).reshape(-1)


def relative_errors(rank, xs):
    """Returns `|decode(encode(x)) - x| / |x|` of one matrix after another."""
    codec = c.power_sgd(rank, KEY).of(SHAPES[:1])
    encode = jax.jit(codec.encode)
    state, errors = codec.init(SIZE, jnp.uint32(0)), []
    for x in xs:
        payload, state = encode(x, state)
        lost = np.asarray(codec.decode(payload, SIZE), np.float64) - x
        errors.append(np.linalg.norm(lost) / np.linalg.norm(x.astype(np.float64)))
    return np.array(errors)


@grid(1, rank=[1, 2, 3], scale=[1e-30, 1e-12, 1, 1e12, 1e18])
def test_power_sgd_is_exact_for_matrices_of_its_rank(rank, scale):
    x = matrix(*range(1, rank + 1)) * np.float32(scale)
    assert (relative_errors(rank, [x] * 4) < 1e-4).all()


def test_power_sgd_turns_to_the_largest_direction():
    """With singular values 1 and s, the angle's tangent shrinks by s^2 each step."""
    s = 0.5
    error = relative_errors(1, [matrix(1, s)] * 4)
    # With the angle t, |M - P P^T M|^2 = s^2 + (1 - s^2) sin^2 t, and |M|^2 = 1 + s^2.
    sin2 = ((1 + s**2) * error**2 - s**2) / (1 - s**2)
    tan2 = sin2 / (1 - sin2)
    # The angle is computed in float32, so sin^2 is off by about 2 sin(t) 1e-7, and by
    # more because M is rounded: 1e-6 in all, less than 5 % of the last tan^2.
    assert tan2[-1] > 2e-5
    np.testing.assert_allclose(tan2[1:] / tan2[:-1], s**4, rtol=0.05)


@pytest.mark.parametrize("before", [[], [1]])
def test_power_sgd_recovers_after_matrices_below_its_rank(before):
    """After zeros or a matrix of rank 1, no column stays zero."""
    poor = matrix(*before) if before else np.zeros(SIZE, np.float32)
    full = matrix(2, 1, seed=1)
    assert (relative_errors(2, [full, poor + full, full])[2:] < 1e-4).all()
    codec = c.power_sgd(2, KEY).of(SHAPES[:1])
    payload, state = codec.encode(poor, codec.init(SIZE, jnp.uint32(0)))
    np.testing.assert_allclose(codec.decode(payload, SIZE), poor, atol=1e-6)
    payload, _ = codec.encode(full, state)
    np.testing.assert_allclose(codec.decode(payload, SIZE), full, atol=2e-4)


def test_power_sgd_keeps_no_nan_in_its_state():
    """A matrix whose products overflow leaves no NaN in the state."""
    codec = c.power_sgd(1, KEY).of(SHAPES[:1])
    state = codec.init(SIZE, jnp.uint32(0))
    payload, state = codec.encode(jnp.full(SIZE, MAX), state)
    assert not np.isfinite(codec.decode(payload, SIZE)).any()
    x = matrix(1)
    payload, _ = codec.encode(x, state)
    np.testing.assert_allclose(codec.decode(payload, SIZE), x, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "layers", "as_matrix"),
    [
        ((16, 12), None, (16, 12)),
        ((24, 4, 6), None, (24, 24)),  # a kernel of attention, (input, heads, size)
        ((4, 6, 24), None, (24, 24)),
        ((3, 3, 8, 16), None, (72, 16)),  # a kernel of a convolution
        ((2, 16, 12), 2, (2, 16, 12)),
        ((2, 24, 4, 6), 2, (2, 24, 24)),
        ((16, 12), 2, (16, 12)),
    ],
)
@pytest.mark.parametrize("make", [c.power_sgd, c.acp_sgd])
def test_leaf_is_sent_as_the_matrix_with_the_fewest_bytes(
    shape, layers, as_matrix, make
):
    """Each matrix is decoded as if it were the only leaf, bit for bit."""
    codec, x = make(2, KEY, layers=layers).of((shape,)), normal(math.prod(shape))
    *stack, rows, columns = as_matrix
    assert codec.size(x.size) == 4 * 2 * math.prod(stack) * (rows + columns)
    alone = make(2, KEY).of(((rows, columns),) * math.prod(stack))
    seed = jnp.uint32(0)
    found, wanted = (each.encode(x, each.init(x.size, seed)) for each in (codec, alone))
    assert_bits_equal(found, wanted)
    decoded = [each.decode(found[0], x.size) for each in (codec, alone)]
    assert_bits_equal(*decoded)


@pytest.mark.parametrize("make", [c.power_sgd, c.acp_sgd])
def test_layers_without_matrices_are_sent_exactly(make):
    """Without `layers`, the biases of all layers would be one matrix."""
    x = normal(24 * 20)
    decoded = []
    for layers in (None, 24):
        codec = make(2, KEY, layers=layers).of(((24, 20),))
        payload, _ = codec.encode(x, codec.init(x.size, jnp.uint32(0)))
        decoded.append(codec.decode(payload, x.size))
    assert not np.array_equal(decoded[0], x)
    np.testing.assert_array_equal(decoded[1], x)


@pytest.mark.parametrize("layers", [0, -1, 1.5, True, "all"])
@pytest.mark.parametrize("make", [c.power_sgd, c.acp_sgd])
def test_wrong_number_of_layers_is_refused(make, layers):
    with pytest.raises(ValueError, match="`layers` must be the length of the first"):
        make(1, KEY, layers=layers)


def test_power_sgd_sends_leaves_other_than_matrices_exactly():
    codec, x = CODECS["power_sgd 2"], normal(N)
    payload, _ = codec.encode(x, codec.init(N, jnp.uint32(0)))
    rest = slice(sum(math.prod(shape) for shape in SHAPES[:2]), None)
    np.testing.assert_array_equal(codec.decode(payload, N)[rest], x[rest])
