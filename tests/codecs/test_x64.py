"""Tests x64: float32 vectors keep their bits, and float64 vectors are rounded once."""

import chex
import jax
import numpy as np
import pytest

from pipejax.codecs import ErrorFeedbackState

from ..grid import each
from ..helpers import assert_bits_equal, x64
from .conformance import CODECS, VARIANTS, N, compiled, due, normal, residual

EACH = pytest.mark.parametrize("name", each(CODECS, full=VARIANTS))
STEPS = 2


def coded(name):
    """Returns the first state, then payload, state and decoded vector of each step."""
    program = compiled(name, N)
    out = [program.state(3)]
    for step in range(STEPS):
        state = out[-1] if step == 0 else out[-1][1]
        payload, state = program.encode(normal(N, step), state)
        out.append((payload, state, program.decode(payload)))
    return jax.tree.map(np.asarray, out)


@EACH
def test_float32_bits_are_the_same_under_x64(name):
    wanted = coded(name)
    with x64():
        assert_bits_equal(coded(name), wanted)


@EACH
def test_float64_travels_as_float32(name):
    """The payload is that of the float32 nearest to the value to encode.

    The residual is float64, and `e' = e + g - Delta` holds to the bit.
    """
    with x64():
        program, codec = compiled(name, N, "float64"), CODECS[name].of(dtype="float64")
        state = program.state(3)
        for step in range(STEPS):
            x = normal(N, step, "float64")
            wanted = due(CODECS[name], x, state)
            payload, after = program.encode(x, state)
            sent = np.asarray(program.decode(payload))
            assert payload.nbytes == codec.size(N)
            assert sent.dtype == np.float32
            chex.assert_trees_all_equal_shapes_and_dtypes(after, state)
            if isinstance(state, ErrorFeedbackState):
                codec, inner = codec.codec, state.codec
                assert_bits_equal(residual(after, x), wanted - sent)
            else:
                inner = state
            nearest, _ = jax.jit(codec.encode)(wanted.astype(np.float32), inner)
            assert_bits_equal(nearest, payload)
            codec, state = CODECS[name].of(dtype="float64"), after
