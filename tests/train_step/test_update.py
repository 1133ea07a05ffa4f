"""What an optimizer is given."""

import jax.numpy as jnp
import optax
import pytest

from pipejax.train_step._update import moved, updated

from ..helpers import assert_bits_equal

ONES = jnp.ones(2)


def plain(updates, state, params=None):
    del params
    return updates, state


def reading(updates, state, params=None, *, value):
    del params
    return value * updates, state


def needing(updates, state, params=None, *, value, value_fn):
    del params, value, value_fn
    return updates, state


def failing(updates, state, params=None, **extra):
    raise TypeError("something else")


def made(update):
    return optax.GradientTransformationExtraArgs(lambda params: (), update)


def test_the_loss_reaches_optimizers_that_read_it():
    for tx, wanted in (
        (made(plain), ONES),
        (made(reading), 3 * ONES),
        (optax.chain(made(plain), optax.identity()), ONES),
    ):
        assert_bits_equal(updated(tx, ONES, tx.init(ONES), ONES, 3.0)[0], wanted)


def test_what_needs_more_is_refused_and_other_errors_pass():
    with pytest.raises(ValueError, match="`tx` must need nothing but .* 'value_fn'"):
        updated(made(needing), ONES, (), ONES, 3.0)
    with pytest.raises(TypeError, match="something else"):
        updated(made(failing), ONES, (), ONES, 3.0)


def test_other_leaves_move_at_once():
    state, after = {"mean": ONES, "seen": jnp.int32(1)}, {"mean": 9.0, "seen": 2}
    out = moved(state, after, {"mean": 2 * ONES, "seen": None})
    assert_bits_equal(out, {"mean": 3 * ONES, "seen": 2})
