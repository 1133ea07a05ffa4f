"""Tests x64: float32 is unchanged, and every algorithm sums float64 in float64."""

import collections
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pipejax as pj
from pipejax import codecs, collectives

from ..grid import grid
from ..helpers import assert_bits_equal, x64
from .cases import ALGORITHMS, FLOAT64, KEY, case, every, program, run
from .cases import QUICK as QUICK_GRID
from .residuals import owed
from .test_all_reduce import check


# tests/codecs/test_x64.py has every codec in the quick run.
@every(FLOAT64, quick={each.algorithm: each for each in QUICK_GRID}.values())
def test_float64_equals_its_twin(each):
    """Sums and codec states have the twin's bits, and transfers the stages' bytes."""
    with x64():
        _, states = check(each, each.vectors(0))
        check(each, each.vectors(1), states)
        found = pj.overlap.inspect(program(each).step).collectives
    sent = [(c.kind, c.bytes) for c in found]
    said = [(t.kind, t.bytes) for t in program(each).transfers]
    assert collections.Counter(sent) == collections.Counter(said)


@grid(1, algorithm=ALGORITHMS, devices=[3, 4, 6])
def test_float64_sum_without_a_codec_is_exact(algorithm, devices):
    """Sums integers of up to 2^53; float32 would keep 24 bits of them."""
    if algorithm == "hierarchical" and devices == 3:
        devices = 2
    each = case(algorithm, None, devices, 100, exact=3, dtype="float64")
    shape = each.vectors().shape
    numbers = np.random.default_rng(0).integers(-(2**50), 2**50, shape)
    with x64():
        sums, _ = run(each, numbers.astype(np.float64))
    total = numbers.sum(axis=0).astype(np.float64)
    np.testing.assert_array_equal(sums, np.tile(total, (devices, 1)), strict=True)


feedback = codecs.error_feedback
IN_STEPS = {
    "two_shot int8": collectives.two_shot(feedback(codecs.int8(8))),
    "two_shot top_k": collectives.two_shot(feedback(codecs.top_k(0.2))),
    "ring int4": collectives.ring(feedback(codecs.int4(8))),
    "ring sign": collectives.ring(feedback(codecs.sign(8))),
    "halving_doubling fp8": collectives.halving_doubling(feedback(codecs.fp8(block=8))),
    "tree quantize": collectives.tree(feedback(codecs.quantize())),
    "tree truncate": collectives.tree(feedback(codecs.truncate())),
    "parameter_server stochastic": collectives.parameter_server(
        feedback(codecs.stochastic(codecs.int4(8), KEY))
    ),
    "two_shot random_k": collectives.two_shot(
        feedback(codecs.random_k(0.2, KEY, scaled=False))
    ),
    "psum power_sgd": collectives.psum(feedback(codecs.power_sgd(1, KEY))),
}
QUICK = {("two_shot int8", 1)}
EACH_IN_STEPS = [
    pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.full)
    for pair in itertools.product(IN_STEPS, (1, 2))
]
DEVICES, RATE, STEPS = 4, 0.125, 5
SHAPE = (8, 12)


def trained(name, width, dtype, loss_fn, batch, steps=STEPS, rate=RATE):
    """Returns the parameters after each step and the drain, and the last state."""
    train = pj.make_train_step(
        loss_fn,
        optax.sgd(rate),
        mesh=pj.data_mesh(DEVICES),
        width=width,
        all_reduce=IN_STEPS[name],
        executor="fused",
    )
    state, history = train.init({"w": jnp.zeros(SHAPE, dtype)}), []
    for _ in range(steps):
        state, _ = train.step(state, batch)
        history.append(np.asarray(state.params["w"]))
    state, _ = train.drain(state)
    return [*history, np.asarray(state.params["w"])], state


def regression(params, batch):
    """Returns half the mean of squares, whose optimum fits every row."""
    error = batch["x"] @ params["w"] - batch["y"]
    return (error * error).sum() / (2 * error.shape[0])


def rows(dtype, count=32):
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(count, SHAPE[0])), rng.normal(size=SHAPE)
    return {"x": x.astype(dtype), "y": (x @ w).astype(dtype)}, w


@pytest.mark.parametrize(("name", "width"), EACH_IN_STEPS)
def test_float32_steps_have_the_same_bits_under_x64(name, width):
    batch, _ = rows("float32")
    wanted, _ = trained(name, width, "float32", regression, batch)
    with jax.enable_x64(True):
        got, _ = trained(name, width, "float32", regression, batch)
    assert_bits_equal(got, wanted)


def residuals_in(states):
    return jax.tree.leaves([state.residual for state in states.values()])


def linear(params, batch):
    """Returns a loss whose gradient is the mean of `batch` at any parameters."""
    return (params["w"] * batch.mean(axis=0)).sum()


@pytest.mark.parametrize(("name", "width"), EACH_IN_STEPS)
def test_float64_steps_conserve_gradients_and_residuals(name, width):
    """`w[T] = w[0] - eta/p (T sum_i g_i - sum e)` holds, e being the residuals.

    Each step rounds a few sums in float64, to 2^-53 of at most the gradients and
    residuals so far.
    """
    batch = np.random.default_rng(1).normal(size=(DEVICES, *SHAPE))
    with jax.enable_x64(True):
        history, state = trained(name, width, "float64", linear, batch)
    states = state.in_flight.codec_states
    assert {x.dtype for x in residuals_in(states)} == {np.dtype("float64")}
    whole = name.split()[0] in ("psum", "tree", "parameter_server")
    cuts = 1 if whole else DEVICES
    left = owed(states, SHAPE[0] * SHAPE[1], DEVICES, cuts)
    total = STEPS * batch.sum(axis=0).reshape(-1)
    wanted = -RATE / DEVICES * (total - left).reshape(SHAPE)
    assert history[-1].dtype == np.float64
    assert np.abs(left).max() > 0
    np.testing.assert_allclose(history[-1], wanted, rtol=0, atol=STEPS * 64 * 2.0**-53)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "width"),
    [
        ("two_shot int8", 2),
        pytest.param("two_shot top_k", 1, marks=pytest.mark.full),
        pytest.param("two_shot top_k", 2, marks=pytest.mark.full),
        pytest.param("ring sign", 2, marks=pytest.mark.full),
    ],
)
def test_float64_steps_converge_to_float64_rounding(name, width):
    """Steps converge to the rounding of float64; float32 would stop at 2^-24 = 6e-8."""
    batch, optimum = rows("float64")
    with jax.enable_x64(True):
        history, _ = trained(name, width, "float64", regression, batch, 1200, 0.1)
    np.testing.assert_allclose(history[-1], optimum, rtol=0, atol=64 * 2.0**-53)
