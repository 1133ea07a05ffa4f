"""Tests ACP-SGD against steps by hand, on matrices with known singular values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipejax import codecs as c
from pipejax.codecs._orthonormal import orthonormal

from ..helpers import assert_bits_equal
from .conformance import CODECS, KEY, SHAPES, N, normal
from .test_power_sgd import SIDES, SIZE, matrix


def run(rank, xs):
    """Returns what the codec makes of one matrix after another, and its states."""
    codec = c.acp_sgd(rank, KEY).of(SHAPES[:1])
    encode = jax.jit(codec.encode)
    states, decoded = [codec.init(SIZE, jnp.uint32(0))], []
    for x in xs:
        payload, state = encode(x, states[-1])
        states.append(state)
        decoded.append(np.asarray(codec.decode(payload, SIZE)).reshape(SIDES))
    return decoded, states


def test_factors_are_sent_in_turn():
    """The even step projects on Q, and the odd step on the P that it has sent."""
    m = matrix(3, 2, 1)
    (first, second), states = run(2, [m, m])
    m = m.reshape(SIDES)
    q = np.asarray(orthonormal([states[0].q.reshape(-1, 2)])[0])
    close = {"rtol": 0, "atol": 1e-5}
    np.testing.assert_allclose(first, m @ q @ q.T, **close)
    p = np.asarray(orthonormal([jnp.asarray(m @ q)])[0])
    np.testing.assert_allclose(second, p @ p.T @ m, **close)
    assert [int(state.turn[0]) for state in states] == [0, 1, 0]
    assert_bits_equal(states[1].q, states[0].q)
    assert_bits_equal(states[2].p, states[1].p)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_acp_sgd_is_exact_for_matrices_of_its_rank_from_the_second_step(rank):
    """The columns of `M Q` span those of M, however Q was drawn."""
    x = matrix(*range(1, rank + 1))
    decoded, _ = run(rank, [x] * 4)
    for each in decoded[1:]:
        np.testing.assert_allclose(each.reshape(-1), x, rtol=0, atol=1e-4)


def test_acp_sgd_turns_to_the_largest_direction():
    """With singular values 1 and s, the tangent of the angle shrinks by s each step."""
    s = 0.5
    decoded, _ = run(1, [matrix(1, s)] * 6)
    m = matrix(1, s).reshape(SIDES).astype(np.float64)
    norm = np.linalg.norm(m)
    error = np.array([np.linalg.norm(x - m) for x in decoded]) / norm
    # As for PowerSGD, with t the angle: |error|^2 = (s^2 + (1 - s^2) sin^2 t) / |M|^2.
    sin2 = ((1 + s**2) * error**2 - s**2) / (1 - s**2)
    tan2 = sin2 / (1 - sin2)
    # The angle is computed in float32, and sin^2 is off by up to 1e-6.
    assert tan2[-1] > 2e-5
    np.testing.assert_allclose(tan2[2:] / tan2[1:-1], s**2, rtol=0.05)


def test_acp_sgd_recovers_after_zeros():
    full = matrix(2, 1, seed=1)
    zeros = np.zeros(SIZE, np.float32)
    decoded, _ = run(2, [zeros, zeros, full, full])
    np.testing.assert_allclose(decoded[-1].reshape(-1), full, rtol=0, atol=2e-4)


def test_acp_sgd_sends_the_longer_side_and_other_leaves():
    """With rank 2, matrices of 16 x 12 and 12 x 20 send 2 (16 + 12) or 2 (12 + 20)."""
    codec, power = CODECS["acp_sgd 2"], CODECS["power_sgd 2"]
    rest = N - 16 * 12 - 12 * 20
    assert power.round_sizes(N) == (2 * 28, 2 * 32 + rest)
    assert codec.round_sizes(N) == (2 * 32 + rest,)
    assert codec.size(N) == power.size(N)
    x = normal(N)
    payload, _ = jax.jit(codec.encode)(x, codec.init(N, jnp.uint32(0)))
    decoded = jax.jit(codec.decode, static_argnums=1)(payload, N)
    np.testing.assert_array_equal(decoded[-rest:], x[-rest:])


def test_message_without_arrays_has_nothing_to_send():
    codec = c.acp_sgd(1, jax.random.key(0)).of(())
    state = codec.init(0, jnp.uint32(0))
    assert codec.project([], state, ()).shape == (0,)
