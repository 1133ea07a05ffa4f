"""What `Codec` promises, of every codec: sizes, bounds, what is not finite, means."""

import itertools
import math

import chex
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from pipejax import codecs as c

from ..helpers import assert_bits_equal
from .conformance import (
    CODECS,
    FAMILIES,
    FEEDBACK,
    KEY,
    MAX,
    PAIRS,
    ROWS,
    SHAPES,
    N,
    compiled,
    due,
    lengths,
    programs,
    vectors,
)

# XLA may take a denormal number for zero, wherever it meets one.
TINY = float(np.finfo(np.float32).smallest_normal)
EPS = 2.0**-24  # of rounding float32 to the nearest, relative

seeds = st.integers(0, 2**32 - 1)
exponents = st.floats(-30, 30)
every_codec = pytest.mark.parametrize("name", CODECS)
every_length = pytest.mark.parametrize(("name", "n"), PAIRS)


def normal(n, seed=0):
    return np.random.default_rng(seed).normal(size=n).astype(np.float32)


def half_ulp(x):
    """Half the distance of float32 numbers at x."""
    return np.spacing(np.abs(x).astype(np.float32)).astype(np.float64) / 2


@every_length
def test_payload_and_state(name, n):
    codec = CODECS[name]
    program = compiled(name, n)
    x, state = normal(n), program.state(3)
    payload, after = program.encode(x, state)
    assert payload.ndim == 1
    assert jnp.issubdtype(payload.dtype, jnp.unsignedinteger)
    assert payload.nbytes == codec.size(n)
    assert_bits_equal((payload, after), program.encode(x, state))
    assert all(leaf.ndim for leaf in jax.tree.leaves(state))
    chex.assert_trees_all_equal_shapes_and_dtypes(state, after)
    chex.assert_shape([program.decode(payload), program.bound(x)], (n,))
    chex.assert_type([program.decode(payload), program.bound(x)], jnp.float32)
    abstract = jax.eval_shape(codec.encode, x, state)
    chex.assert_trees_all_equal_shapes_and_dtypes(abstract, (payload, after))


@every_length
def test_alone_as_among_rows(name, n):
    """Under `jit` alone and as a row under `vmap`: the same state, the same result."""
    program, alone = programs(name, n), compiled(name, n)
    rows = np.stack([normal(n, seed) for seed in range(ROWS)])
    payloads, after = program.encode(rows, program.state)
    got = program.decode(payloads)
    for i, row in enumerate(rows[:3]):
        payload, then = alone.encode(row, alone.state(i))
        assert payload.shape == payloads[i].shape
        # Sums may be in another order: of at most 128 terms in a block of sign, in a
        # matrix of power_sgd of fewer, thrice. No code is near enough to the next one.
        close = {"rtol": 512 * EPS, "atol": 512 * EPS * float(np.abs(row).max())}
        chex.assert_trees_all_close(got[i], alone.decode(payload), **close)
        chex.assert_trees_all_close(
            [s[i] for s in jax.tree.leaves(after)], jax.tree.leaves(then), **close
        )


def assert_within_bound(name, n, batches):
    """Encodes rows [rows, n], one batch after another, against `codec.bound`."""
    program = programs(name, n)
    state = program.state
    for x in batches:
        wanted = due(x, state)
        payload, state = program.encode(x, state)
        got, bound = np.asarray(program.decode(payload)), program.bound(wanted)
        with np.errstate(invalid="ignore", over="ignore"):
            error = np.abs(got.astype(np.float64) - wanted)
            within = error <= np.asarray(bound, np.float64) + TINY
        # Nothing is claimed where the bound is infinite. With feedback, huge vectors
        # add up to what is not finite.
        finite = np.isfinite(wanted).all(axis=1, keepdims=True)
        within |= np.isposinf(bound) | ~finite
        row, i = np.unravel_index(np.argmin(within), within.shape)
        assert within.all(), (n, row, i, wanted[row, i], got[row, i], bound[row, i])


@every_codec
@hypothesis.given(exponent=exponents, seed=seeds)
def test_error_is_within_the_bound(name, exponent, seed):
    for n in lengths(name):
        batches = [vectors(n, exponent, seed + step) for step in range(2)]
        assert_within_bound(name, n, batches)


floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@every_codec
@hypothesis.given(numbers=arrays(np.float32, (2, 16), elements=floats))
def test_error_is_within_the_bound_whatever_the_floats(name, numbers):
    for n in lengths(name):
        # From another one of them in each row on.
        starts = np.arange(n)[None, :] + np.arange(ROWS)[:, None]
        assert_within_bound(name, n, [row[starts % row.size] for row in numbers])


@every_codec
@hypothesis.given(
    value=st.sampled_from([np.nan, np.inf, -np.inf]),
    place=st.floats(0, 1, exclude_max=True),
    exponent=exponents,
    seed=seeds,
)
def test_what_is_not_finite_is_not_lost(name, value, place, exponent, seed):
    for n in lengths(name):
        program = programs(name, n)
        _, state = program.encode(vectors(n, 0, seed), program.state)
        x = vectors(n, exponent, seed + 1)
        x[:, int(place * n)] = value
        got = np.asarray(program.decode(program.encode(x, state)[0]))
        lost = np.isfinite(got).all(axis=1)
        assert not lost.any(), (n, list(itertools.compress(FAMILIES, lost)))


# Error feedback: `Delta + e' = e + g`.

# Those of which `e' = due - Delta` is a float32, so that nothing is rounded:
# - top_k, random_k: Delta is due, or 0;
# - truncate: Delta is due without its lower bits, and e' is these;
# - levels and floats of fewer bits: Delta is 0, or at least half of due and at most
#   twice, for the nearest level but 0 is off by at most half of itself. The difference
#   of two such numbers is one (Sterbenz 1974).
# Not sign, whose Delta is of any size, nor quantize and power_sgd, whose Delta may even
# have the other sign.
EXACT = {"bf16", "truncate", "int4", "fp8", "top_k", "random_k"}


@pytest.mark.parametrize("name", FEEDBACK)
@hypothesis.given(exponent=exponents, seed=seeds)
def test_feedback_conserves(name, exponent, seed):
    """Operation by operation, for XLA rounds products in sums once, not twice."""
    codec, state = CODECS[name], programs(name, N).state
    for step in range(2):
        x = vectors(N, exponent, seed + step)
        wanted = due(x, state)
        payload, state = jax.vmap(codec.encode)(x, state)
        sent = np.asarray(jax.vmap(lambda p: codec.decode(p, N))(payload))
        kept = np.isfinite(wanted) & np.isfinite(sent)
        kept = kept.all(axis=1)
        lost = wanted[kept].astype(np.float64) - sent[kept]
        error = np.abs(np.asarray(state.residual)[kept] - lost)
        # The difference of two float32 numbers, rounded once: half a unit in the last
        # place of it, which is at most |due| + |Delta|.
        exact = name.removeprefix("feedback ") in EXACT
        allowed = TINY if exact else half_ulp(lost) + TINY
        assert (error <= allowed).all()


@pytest.mark.parametrize("name", FEEDBACK)
def test_what_is_sent_follows_what_is_due(name):
    """`sum Delta + e = sum g` over 20 steps, as compiled, to rounding."""
    program, steps = compiled(name, N), 20
    state = program.state(0)
    total, rounding = np.zeros(N), np.zeros(N)
    for step in range(steps):
        x = normal(N, seed=step)
        wanted = due(x, state)
        payload, state = program.encode(x, state)
        sent = np.asarray(program.decode(payload))
        total += x.astype(np.float64) - sent
        # Half a unit for e + g, for Delta, and for their difference. In quantize also
        # for `q level` inside Delta, which no other number tells the size of: it is at
        # most the difference of two elements.
        largest = 2 * np.abs(np.stack([wanted, sent])).max()
        rounding += 2 * half_ulp(wanted) + half_ulp(sent) + half_ulp(largest)
    assert (np.abs(total - state.residual) <= rounding).all()


# Means, over random numbers.

DRAWS = 64  # of each of as many seeds: 4,096
UNBIASED = [name for name, codec in CODECS.items() if codec.unbiased]


def mean_is_off(name):
    """Where the mean of `decode(encode(x)) - x` is further from 0 than chance takes it.

    An error is in [-b, b], b the bound. By Hoeffding the mean of m of them is beyond t
    with probability at most `2 exp(-m t^2 / 2 b^2)`, however they are distributed. Over
    all elements of all codecs that is to be 1e-6 (Bonferroni): a false alarm for one in
    a million sets of seeds, and these are fixed.
    """
    codec, x = CODECS[name], normal(N)

    def step(state, _):
        payload, state = codec.encode(x, state)
        return state, codec.decode(payload, N)

    def draws(seed):
        return jax.lax.scan(step, codec.init(N, seed), length=DRAWS)[1]

    got = jax.jit(jax.vmap(draws))(jnp.arange(DRAWS, dtype=jnp.uint32))
    mean = np.asarray(got, np.float64).mean(axis=(0, 1))
    tests = N * len(UNBIASED)
    t = np.asarray(codec.bound(x)) * math.sqrt(2 * math.log(2 * tests / 1e-6)) / DRAWS
    return np.abs(mean - x) > t + 4 * EPS * np.abs(got).max(axis=(0, 1))


@pytest.mark.parametrize("name", UNBIASED)
def test_unbiased(name):
    assert not mean_is_off(name).any()


@pytest.mark.parametrize("codec", [c.int8(8), c.int4(8), c.quantize(8), c.bf16()])
@pytest.mark.parametrize("noise", [0.0, 1 - 2.0**-24])
def test_stochastic_rounding_stays_within_its_levels(codec, noise):
    """The largest of a block, times L over itself, may round to more than L."""
    x = normal(2**16)
    payload = codec.rounded(jnp.asarray(x), jnp.full(x.size, noise))
    error = np.abs(np.asarray(codec.decode(payload, x.size)) - x)
    assert (error <= 2 * np.asarray(codec.bound(x))).all()


@pytest.mark.parametrize("name", ["int4", "bf16", "truncate", "random_k 5, unscaled"])
def test_bias_is_found(name):
    """t is 0.11 b, and what is always rounded the same way has errors of up to b."""
    assert not CODECS[name].unbiased
    assert mean_is_off(name).mean() > 0.5


@pytest.mark.parametrize(
    ("codec", "needs"),
    [
        (c.cast("float32"), False),
        (c.bf16(), False),
        (c.truncate(), True),
        (c.quantize(1), False),
        (c.int8(), False),
        (c.int4(), False),
        (c.fp8(), False),
        (c.sign(), True),
        (c.top_k(1), True),
        (c.random_k(1, KEY), False),
        (c.random_k(1, KEY, scaled=False), True),
        (c.power_sgd(1, KEY), True),
        (c.stochastic(c.int4(), KEY), False),
    ],
)
def test_who_needs_feedback(codec, needs):
    assert codec.needs_feedback == needs
    if not isinstance(codec, c.Linear) or needs:
        assert not c.error_feedback(codec).needs_feedback


# Linear codecs.

LINEAR = [name for name, codec in CODECS.items() if codec.rounds]


@pytest.mark.parametrize("name", LINEAR)
def test_sums_of_payloads_are_payloads_of_sums(name):
    codec, x, y = CODECS[name], normal(N, 1), normal(N, 2)
    state = codec.init(N, jnp.uint32(0))
    # Products of at most 20 terms, none above 4 |M| |Q|, and two of them added.
    close = {"rtol": 0, "atol": 64 * EPS * 4 * float(jnp.linalg.norm(x))}
    sizes = codec.round_sizes(N)
    assert codec.rounds == len(sizes)
    sums = ()
    for size in sizes:
        a, b, both = (codec.project(v, state, sums) for v in (x, y, x + y))
        chex.assert_shape([a, b], (size,))
        chex.assert_trees_all_close(a + b, both, **close)
        sums = (*sums, a + b)
    one, other, summed = (
        codec.rebuild(state, (*sums[:-1], v), N) for v in (a, b, sums[-1])
    )
    chex.assert_trees_all_close(one + other, summed, **close)


@pytest.mark.parametrize("name", LINEAR)
def test_one_device_sums_what_it_would_encode(name):
    codec, x = CODECS[name], normal(N)
    state = codec.init(N, jnp.uint32(0))
    sums = ()
    for _ in range(codec.rounds):
        sums = (*sums, codec.project(x, state, sums))
    payload, after = codec.encode(x, state)
    assert_bits_equal(codec.rebuild(state, sums, N), codec.decode(payload, N))
    assert_bits_equal(codec.settled(x, state, sums, sums[-1]), after)


# PowerSGD.

SIDES = SHAPES[0]
SIZE = math.prod(SIDES)


def matrix(*singular_values, seed=0):
    """A matrix of 16 x 12 as a vector, with these singular values."""
    rng = np.random.default_rng(seed)
    u, v = (
        np.linalg.qr(rng.normal(size=(side, len(singular_values))))[0] for side in SIDES
    )
    return (u * np.array(singular_values) @ v.T).astype(np.float32).reshape(-1)


def relative_errors(rank, xs):
    """Of one matrix after another, `|decode(encode(x)) - x| / |x|`."""
    codec = c.power_sgd(rank, KEY).of(SHAPES[:1])
    encode = jax.jit(codec.encode)
    state, errors = codec.init(SIZE, jnp.uint32(0)), []
    for x in xs:
        payload, state = encode(x, state)
        lost = np.asarray(codec.decode(payload, SIZE), np.float64) - x
        errors.append(np.linalg.norm(lost) / np.linalg.norm(x.astype(np.float64)))
    return np.array(errors)


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1, 1e12, 1e18])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_power_sgd_has_what_is_of_its_rank(rank, scale):
    x = matrix(*range(1, rank + 1)) * np.float32(scale)
    assert (relative_errors(rank, [x] * 4) < 1e-4).all()


def test_power_sgd_turns_to_the_largest_direction():
    """With singular values 1 and s, the angle's tangent shrinks by s^2 a step."""
    s = 0.5
    error = relative_errors(1, [matrix(1, s)] * 4)
    # |M - P P^T M|^2 = s^2 + (1 - s^2) sin^2 t, of |M|^2 = 1 + s^2, t the angle.
    sin2 = ((1 + s**2) * error**2 - s**2) / (1 - s**2)
    tan2 = sin2 / (1 - sin2)
    # The angle is of float32, so sin^2 is off by 2 sin(t) 1e-7 or so, and more by what
    # rounds M: 1e-6 in all, of the last tan^2 less than 5 %.
    assert tan2[-1] > 2e-5
    np.testing.assert_allclose(tan2[1:] / tan2[:-1], s**4, rtol=0.05)


@pytest.mark.parametrize("before", [[], [1]])
def test_power_sgd_comes_back_after_less_than_its_rank(before):
    """Zeros, or a matrix of rank 1: no column stays zero for ever."""
    poor = matrix(*before) if before else np.zeros(SIZE, np.float32)
    full = matrix(2, 1, seed=1)
    assert (relative_errors(2, [full, poor + full, full])[2:] < 1e-4).all()
    codec = c.power_sgd(2, KEY).of(SHAPES[:1])
    payload, state = codec.encode(poor, codec.init(SIZE, jnp.uint32(0)))
    np.testing.assert_allclose(codec.decode(payload, SIZE), poor, atol=1e-6)
    payload, _ = codec.encode(full, state)
    np.testing.assert_allclose(codec.decode(payload, SIZE), full, atol=2e-4)


def test_power_sgd_forgets_what_was_not_finite():
    """A matrix whose products overflow leaves no NaN behind."""
    codec = c.power_sgd(1, KEY).of(SHAPES[:1])
    state = codec.init(SIZE, jnp.uint32(0))
    payload, state = codec.encode(jnp.full(SIZE, MAX), state)
    assert not np.isfinite(codec.decode(payload, SIZE)).any()
    x = matrix(1)
    payload, _ = codec.encode(x, state)
    np.testing.assert_allclose(codec.decode(payload, SIZE), x, atol=1e-5)


def test_power_sgd_sends_what_is_no_matrix_as_it_is():
    codec, x = CODECS["power_sgd 2"], normal(N)
    payload, _ = codec.encode(x, codec.init(N, jnp.uint32(0)))
    rest = slice(sum(math.prod(shape) for shape in SHAPES[:2]), None)
    np.testing.assert_array_equal(codec.decode(payload, N)[rest], x[rest])
