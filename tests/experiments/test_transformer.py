"""Tests the transformer's loss at the start, and that a scan changes nothing."""

import dataclasses
import math

import chex
import jax
import jax.numpy as jnp
import pytest

from experiments import transformer

SMALL = transformer.Config(layers=3, features=32, heads=4, context=16)


def init(config):
    return jax.jit(lambda: transformer.init(jax.random.key(0), config))()


def gradient(config):
    return jax.jit(jax.value_and_grad(transformer.loss_fn(config)))


def tokens(shape=(4, 17)):
    return jax.random.randint(jax.random.key(1), shape, 0, 256)


def stacked(params):
    layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params["layers"])
    return params | {"layers": layers}


def test_all_bytes_are_about_equally_likely_at_the_start():
    params = init(SMALL)
    loss = jax.jit(transformer.loss_fn(SMALL))(params, tokens())
    # Logits of deviation 0.02 sqrt(32) = 0.11 add half of its square, 0.006, to the
    # loss.
    assert loss == pytest.approx(math.log(256), abs=0.1)


def test_scan_has_the_same_loss_and_gradients():
    scan = dataclasses.replace(SMALL, scan=True)
    line, looped = (init(c) for c in (SMALL, scan))
    chex.assert_trees_all_close(stacked(line), looped, rtol=1e-6)
    loss, grads = gradient(SMALL)(line, tokens())
    other, others = gradient(scan)(looped, tokens())
    assert float(other) == pytest.approx(float(loss), rel=1e-6)
    chex.assert_trees_all_close(stacked(grads), others, rtol=1e-4, atol=1e-6)


def test_tokens_do_not_see_later_tokens():
    params = init(SMALL)
    logits = jax.jit(lambda tokens: transformer._logits(params, tokens, SMALL))
    a, b = tokens((2, 9))
    mixed = jnp.concatenate([a[:5], b[5:]])
    chex.assert_trees_all_close(logits(a)[:5], logits(mixed)[:5], rtol=1e-6)
    assert jnp.all(logits(a)[5] != logits(mixed)[5])


def test_default_size_has_38_million_parameters():
    shapes = jax.eval_shape(
        lambda key: transformer.init(key, transformer.Config()), jax.random.key(0)
    )
    # There are 3 + 1 matrices for attention, 4 + 4 for the MLP, and two norms.
    layer = 12 * 512**2 + 2 * 512
    total = 12 * layer + 2 * 256 * 512 + 512
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == total == 38_023_680


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 5}, "`features` must be a multiple of `heads`; got 32 and 5"),
        ({"layers": 0}, "sizes must be positive"),
    ],
)
def test_bad_sizes_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **change)
