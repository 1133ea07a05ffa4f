"""Tests functions cut into segments: equal results, equal work, places of the cuts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipejax._core.executors._flops import flops_of
from pipejax._core.executors._segments import segments_of

from ...grid import grid


def equal(count):
    return [1 / count] * count


def layers(params, x):
    for w in params["w"]:
        x = jnp.tanh(x @ w)
    return (x**2).mean()


def scanned(params, x):
    def layer(x, w):
        return jnp.tanh(x @ w), x.sum()

    x, sums = jax.lax.scan(layer, x, params["w"])
    return (x**2).mean() + sums.mean()


def backwards(params, x):
    x, outs = jax.lax.scan(
        lambda x, w: (jnp.tanh(x @ w), x[0]), x, params["w"], reverse=True
    )
    return (x**2).mean() + (outs[0] ** 2).mean()


def convolved(params, x):
    image = x.reshape(1, 4, 6, 2)
    kernel = params["w"][0, :2, :].reshape(2, 1, 2, 3)[..., :2].swapaxes(1, 2)
    y = jax.lax.conv_general_dilated(
        image, kernel[:, :1], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return (y**2).mean() + scanned(params, x)


def with_a_key(params, x):
    keep = jax.random.bernoulli(jax.random.key(3), 0.5, x.shape)
    return scanned(params, jnp.where(keep, x, 0.0))


def branching(params, x):
    return jax.lax.cond(x.sum() > 0, layers, scanned, params, x)


FUNCTIONS = {
    "layers": layers,
    "scan": scanned,
    "reverse scan": backwards,
    "jit": jax.jit(scanned),
    "jit in jit, twice": lambda p, x: jax.jit(jax.jit(layers))(p, x) + layers(p, x),
    "remat": jax.checkpoint(scanned),
    "key": with_a_key,
    "cond": branching,
}


def example():
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(6, 12, 12)).astype(np.float32)}
    return params, rng.normal(size=(4, 12)).astype(np.float32)


def in_pieces(function, count, *args):
    segments, result = segments_of(function, equal(count), *args)
    assert len(segments) == count
    values = []
    for segment in segments:
        values = jax.lax.optimization_barrier(segment(values))
    return result(values)


# The quick run cuts every function once, and most of them in three.
@grid(1, count=[3, 7, 2, 1], name=FUNCTIONS)
def test_pieces_give_the_same_result(name, count):
    """Pieces give the same gradients too; barriers between them may change rounding."""
    function = jax.value_and_grad(FUNCTIONS[name])
    want = jax.jit(function)(*example())
    got = jax.jit(lambda *args: in_pieces(function, count, *args))(*example())
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_arguments_and_constants_may_be_results():
    def function(x):
        return x, jnp.float32(3), (x + 1, None)

    got = jax.jit(lambda x: in_pieces(function, 2, x))(jnp.float32(1))
    assert jax.tree.map(float, got) == (1.0, 3.0, (2.0, None))


def work(function, count):
    """Returns each segment's share of the FLOPs of the traced function."""
    segments, _ = segments_of(jax.value_and_grad(function), equal(count), *example())
    return shares_of(segments)


def shares_of(segments):
    fractions, values = [], []
    for segment in segments:
        values, jaxpr = segment(values), jax.make_jaxpr(segment)(values)
        fractions.append(sum(map(flops_of, jaxpr.jaxpr.eqns)))
    return np.array(fractions) / sum(fractions)


@pytest.mark.parametrize("count", [2, 3])
def test_layers_are_cut_into_equal_work(count):
    """Six layers have 17 matmuls, and each cut is within one matmul of its place."""
    np.testing.assert_allclose(work(layers, count), 1 / count, atol=1 / 17)


def test_scan_with_a_cut_near_its_edge_is_left_whole():
    """The forward scan has 6 matmuls and the backward one 12; the cut is in between."""
    fractions = work(scanned, 2)
    np.testing.assert_allclose(fractions, [1 / 3, 2 / 3], atol=0.03)


def microbatched(params, x):
    def one(total, part):
        return jax.tree.map(jnp.add, total, jax.grad(layers)(params, part)), None

    zeros = jax.tree.map(jnp.zeros_like, params)
    return jax.lax.scan(one, zeros, x.reshape(4, 1, 12))[0]


@pytest.mark.parametrize("count", [2, 4])
def test_scan_over_microbatches_is_cut(count):
    segments, _ = segments_of(microbatched, equal(count), *example())
    np.testing.assert_allclose(shares_of(segments), 1 / count)


def test_pieces_have_the_given_shares():
    """Six layers have 17 matmuls."""
    segments, _ = segments_of(jax.value_and_grad(layers), [0.5, 0.25, 0.25], *example())
    np.testing.assert_allclose(shares_of(segments), [0.5, 0.25, 0.25], atol=1 / 17)


@pytest.mark.parametrize("function", [layers, scanned])
@pytest.mark.parametrize("ends", [0.11, 0.06, 0.02])
def test_short_segments_at_both_ends_have_work(function, ends):
    """In two levels, the first and last stage send only inside hosts."""
    given = [ends, 0.5 - ends, 0.5 - ends, ends]
    segments, _ = segments_of(jax.value_and_grad(function), given, *example())
    found = shares_of(segments)
    # The scans are cut at one of 6 layers, of which the backward pass has 2 matmuls.
    np.testing.assert_allclose(found, given, atol=0.25 if ends == 0.02 else 0.12)
    assert (found > 0).all()


@pytest.mark.parametrize("function", [layers, scanned])
def test_small_share_is_one_operation(function):
    """A stage that sends a few numbers has a matmul, or one iteration, beside it."""
    segments, _ = segments_of(
        jax.value_and_grad(function), [0.499, 0.002, 0.499], *example()
    )
    fractions = shares_of(segments)
    assert 0 < fractions[1] <= 2 / 17
    np.testing.assert_allclose(fractions[[0, 2]], 0.5, atol=0.2)


@pytest.mark.parametrize("bias", ["an argument", "computed"])
def test_masks_and_sums_are_computed_again(bias):
    """A layer hands on its matmul, and neither its ReLU nor the mask of it.

    A bias that is computed is handed on for that: it is small beside the matmul.
    """

    def net(params, x):
        for w, scale, b in params:
            bias_now = jnp.sin(b) if bias == "computed" else b
            x = jax.nn.relu((x @ w) * scale + bias_now)
        return (x**2).mean()

    params = [(jnp.eye(8), jnp.ones((1, 8)), jnp.ones((1, 8)))] * 4
    segments, result = segments_of(
        jax.value_and_grad(net), equal(2), params, jnp.ones((32, 8))
    )
    handed = jax.eval_shape(segments[0], [])
    assert not [x for x in handed if x.dtype == bool]
    # The four matmuls, and the gradient with which the backward pass goes on.
    assert sum(x.shape == (32, 8) for x in handed) <= 5
    expected = jax.value_and_grad(net)(params, jnp.ones((32, 8)))
    found = result(segments[1](segments[0]([])))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
