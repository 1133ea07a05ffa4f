"""Tests where devices take gradients, if the optimizer is sharded."""

import itertools
import re

import jax
import numpy as np
import optax
import pytest

import pipejax as pj

from ...helpers import assert_bits_equal
from .test_zero1 import (
    FULL,
    ONE_PYTHON,
    OPTIMIZERS,
    assert_close,
    batches,
    both,
    loss_fn,
    params,
    run,
)


def products():
    """Returns an optimizer whose update multiplies gradient and parameter."""
    return optax.stateless(
        lambda g, w: jax.tree.map(lambda g, w: -0.1 * g * (1 + w * w), g, w)
    )


PREDICTED = OPTIMIZERS | {
    "lamb": optax.lamb(1e-2),
    "centered rmsprop": optax.rmsprop(1e-2, centered=True, momentum=0.9),
    "acprop": optax.contrib.acprop(1e-2),
    "adam without eps": optax.adam(1e-2, eps=0.0),
    "lion": optax.lion(1e-3),
    "sam": optax.contrib.sam(optax.sgd(0.05), optax.sgd(0.02), sync_period=2),
    "normalize": optax.chain(optax.contrib.normalize(), optax.sgd(0.05)),
    "multi steps": optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(),
    "products": products(),
    "frozen": optax.chain(
        optax.adam(1e-2), optax.freeze(dict.fromkeys(params(), False) | {"up": True})
    ),
}


# One of each kind: with sums over arrays, with products, and by parts.
QUICK = {
    ("lamb", 2, 1, "fused"),
    ("products", 2, 2, "fused"),
    ("frozen", 2, 4, "fused"),
}


@ONE_PYTHON
@pytest.mark.parametrize(
    ("name", "width", "devices", "executor"),
    [
        pytest.param(*case, marks=() if case in QUICK else FULL)
        for case in itertools.product(PREDICTED, (2, 3), (4, 2, 1), ("fused", "host"))
    ],
)
def test_exact_predictions_are_close_to_unsharded(name, width, devices, executor):
    # After a step at width 1, both know a mean before they predict.
    options = {"width": width, "executor": executor, "exact": True, "warmup_steps": 1}
    (wanted, losses), (found, others) = both(PREDICTED[name], devices, **options)
    assert_close(found.params, wanted.params, 1e-5)
    np.testing.assert_allclose(others, losses, rtol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("name", [pytest.param("adamw", marks=FULL), "clip+momentum"])
def test_predictions_with_slopes_of_8_bits_are_close(name):
    (wanted, losses), (found, others) = both(OPTIMIZERS[name], steps=20, warmup_steps=1)
    _, plain = run(OPTIMIZERS[name], steps=20, weight_prediction=False)
    off, without = (np.nanmax(np.abs(x - losses)) for x in (others, plain))
    assert 0 < off < without / 10
    assert_close(found.params, wanted.params, 0.002)


@pytest.mark.parametrize("width", [2, pytest.param(3, marks=FULL)])
def test_prediction_waits_for_a_known_mean(width):
    """The first mean is applied at the end of step K, after K losses."""
    tx = OPTIMIZERS["adamw"]
    _, losses = run(tx, shard_optimizer=True, width=width)
    _, plain = run(tx, shard_optimizer=True, width=width, weight_prediction=False)
    found, wanted = (x[np.isfinite(x)] for x in (losses, plain))
    assert_bits_equal(found[:width], wanted[:width])
    assert (found[width:] != wanted[width:]).all()


def test_devices_compute_an_update_of_their_pieces_alone():
    """Adam takes the roots of its second moments: of whole arrays without pieces."""

    def roots(**options):
        tx, mesh = OPTIMIZERS["adamw"], pj.data_mesh(4)
        train = pj.make_train_step(loss_fn, tx, mesh=mesh, **options)
        program = train.lower(train.init(params()), batches(1)[0]).as_text()
        return set(re.findall(r"stablehlo\.sqrt .*tensor<(\d+x\d+)xf32>", program))

    assert roots() == {"5x16", "16x3"}
    assert roots(shard_optimizer=True) == {"5x4", "4x3"}
