"""Tests that feedback conserves, `Delta + e' = e + g`, and which codecs need it."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipejax import codecs as c

from ..collectives.reference import EXACT_BITS
from ..grid import each
from .conformance import (
    CODECS,
    FEEDBACK,
    KEY,
    TINY,
    VARIANTS,
    N,
    compiled,
    dtypes,
    due,
    exponents,
    normal,
    programs,
    residual,
    seeds,
    vectors,
)


def half_ulp(x, dtype="float32"):
    """Returns half the distance between numbers of this dtype at x."""
    return np.spacing(np.abs(x).astype(dtype)).astype(np.float64) / 2


#
# For these codecs, `e' = due - Delta` is a number of due's dtype, and is not rounded:
# - top_k, random_k: Delta is due, or 0;
# - truncate: Delta is due without its lower bits, and e' is these bits;
# - levels and floats of fewer bits: Delta is 0, or between half of due and twice due,
#   because the nearest level other than 0 is off by at most half of itself. The
#   difference of two such numbers is a number of the dtype (Sterbenz 1974).
# sign, int2 and rotated are missing because their Delta has any size, and quantize,
# power_sgd and acp_sgd because the sign of their Delta may differ from that of due.
EXACT = {"bf16", "truncate", "int4", "fp4", "fp8", "top_k", "random_k"}


@functools.cache
def exact_programs(codec):
    """Compiles a codec so that a product inside a sum is rounded before the sum."""
    jit = functools.partial(jax.jit, compiler_options=EXACT_BITS)
    decode = jax.vmap(lambda payload: codec.decode(payload, N))
    return jit(jax.vmap(codec.encode)), jit(decode)


@pytest.mark.parametrize("name", each(FEEDBACK, full=VARIANTS))
@hypothesis.given(exponent=exponents, seed=seeds, dtype=dtypes)
def test_error_feedback_conserves_each_step(name, exponent, seed, dtype):
    codec, state = CODECS[name].of(dtype=dtype), programs(name, N, dtype).state
    encode, decode = exact_programs(codec)
    for step in range(2):
        x = vectors(N, exponent, seed + step, dtype)
        wanted = due(codec, x, state)
        payload, state = encode(x, state)
        sent = np.asarray(decode(payload))
        kept = np.isfinite(wanted) & np.isfinite(sent)
        kept = kept.all(axis=1)
        lost = wanted[kept].astype(np.float64) - sent[kept]
        error = np.abs(residual(state, x)[kept] - lost)
        # The difference of two numbers is rounded once, by at most half a unit in its
        # last place. The difference is at most |due| + |Delta|.
        exact = name.removeprefix("feedback ") in EXACT
        allowed = TINY if exact else half_ulp(lost, dtype) + TINY
        assert (error <= allowed).all()


@pytest.mark.parametrize("name", each(FEEDBACK, full=VARIANTS))
def test_error_feedback_conserves_over_20_compiled_steps(name):
    """`sum Delta + e = sum g` holds over 20 compiled steps, up to rounding.

    With a decay, what each step forgets of the residual is missing from the sum.
    """
    codec, program, steps = CODECS[name], compiled(name, N), 20
    state = program.state(0)
    total, rounding = np.zeros(N), np.zeros(N)
    for step in range(steps):
        x = normal(N, seed=step)
        wanted = due(codec, x, state)
        total -= (1 - codec.decay) * residual(state, x).astype(np.float64)
        payload, state = program.encode(x, state)
        sent = np.asarray(program.decode(payload))
        total += x.astype(np.float64) - sent
        # e + g, Delta and their difference are each rounded by half a unit. In
        # quantize, so is `q level` inside Delta. Its size is not known, but it is at
        # most the difference of two elements.
        largest = 2 * np.abs(np.stack([wanted, sent])).max()
        rounding += 2 * half_ulp(wanted) + half_ulp(sent) + half_ulp(largest)
    assert (np.abs(total - residual(state, total)) <= rounding).all()


def test_decay_halves_the_residual_in_each_step():
    """Only the largest element is sent.

    The residual of the element 2 is 2, then 2 + 1 = 3, then 2 + 1.5 = 3.5.
    """
    codec = c.error_feedback(c.top_k(1), decay=0.5)
    gradient, state = np.float32([8, 2, 1]), codec.init(3, jnp.uint32(0))
    for wanted in ([0, 2, 1], [0, 3, 1.5], [0, 3.5, 1.75]):
        payload, state = codec.encode(jnp.asarray(gradient), state)
        np.testing.assert_array_equal(codec.decode(payload, 3), [8, 0, 0])
        np.testing.assert_array_equal(state.residual, wanted)


@pytest.mark.parametrize(
    ("codec", "needs"),
    [
        (c.cast("float32"), False),
        (c.bf16(), False),
        (c.truncate(), True),
        (c.quantize(1), False),
        (c.int8(), False),
        (c.int4(), False),
        (c.int2(), True),
        (c.fp4(), False),
        (c.fp8(), False),
        (c.sign(), True),
        (c.top_k(1), True),
        (c.random_k(1, KEY), False),
        (c.random_k(1, KEY, scaled=False), True),
        (c.power_sgd(1, KEY), True),
        (c.acp_sgd(1, KEY), True),
        (c.stochastic(c.int4(), KEY), False),
        (c.rotated(c.int4(), KEY), False),
        (c.rotated(c.sign(), KEY), True),
    ],
)
def test_each_codec_declares_its_need_of_feedback(codec, needs):
    assert codec.needs_feedback == needs
    if not isinstance(codec, c.Linear) or needs:
        assert not c.error_feedback(codec).needs_feedback
