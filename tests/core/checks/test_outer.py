"""Tests which outer optimizers are refused, because chunks do not suit them."""

import jax
import optax
import pytest

from pipejax._core.checks import check_outer

SGD = optax.sgd(0.7)


def decaying(mask):
    return optax.adamw(0.1, weight_decay=1e-4, mask=mask)


def by_ndim(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


def by_name(params):
    return jax.tree.map_with_path(lambda path, _: path[-1].key != "bias", params)


WARMED_UP = optax.warmup_cosine_decay_schedule(0.0, 1.0, 10, 100)


@pytest.mark.parametrize(
    "outer_tx",
    [
        SGD,
        optax.adam(0.1),
        optax.sgd(0.7, momentum=0.9, nesterov=True),
        optax.adamw(WARMED_UP, weight_decay=0.5),
        optax.rmsprop(0.1),
        optax.lion(0.1),
        optax.contrib.schedule_free(SGD, 1.0, b1=0.9),  # subtracts parameters
        optax.contrib.schedule_free(optax.adam(1e-3), 1e-3),
    ],
)
def test_optimizer_of_single_elements_suits_chunks(outer_tx):
    assert check_outer(outer_tx) is outer_tx


@pytest.mark.parametrize(
    "outer_tx",
    [
        decaying(by_ndim),
        decaying(by_name),
        optax.adamw(WARMED_UP, weight_decay=0.5, mask=by_ndim),
        optax.masked(SGD, by_ndim),
        optax.scale_by_factored_rms(),
    ],
)
def test_optimizer_depending_on_names_or_shapes_is_refused(outer_tx):
    with pytest.raises(ValueError, match="`outer_tx` must treat all parameters alike"):
        check_outer(outer_tx)


@pytest.mark.parametrize(
    ("outer_tx", "error"),
    [
        (optax.masked(SGD, {"w": True, "b": False}), "ValueError: "),
        (optax.partition({"a": SGD, "z": SGD}, {"w": "a", "b": "z"}), "ValueError: "),
        (optax.chain(SGD, optax.contrib.reduce_on_plateau()), "TypeError: .*'value'"),
        (optax.lookahead(SGD, 2, 0.5), "AttributeError: .*'fast'"),
    ],
)
def test_optimizer_unable_to_update_chunks_is_refused(outer_tx, error):
    message = f"`outer_tx` must update arrays of any names .* raises {error}.* Choose"
    with pytest.raises(ValueError, match=message):
        check_outer(outer_tx)


def test_sum_in_a_branch_of_an_outer_optimizer_is_found():
    """`MultiSteps` updates in a branch."""
    clipped = optax.chain(optax.clip_by_global_norm(1.0), SGD)
    suits = optax.MultiSteps(SGD, 2).gradient_transformation()
    assert check_outer(suits) is suits
    outer_tx = optax.MultiSteps(clipped, 2).gradient_transformation()
    with pytest.raises(ValueError, match="`outer_tx` must"):
        check_outer(outer_tx)
