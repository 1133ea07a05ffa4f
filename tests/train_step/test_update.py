"""What accelerators run in place of CPU's branch, tried on CPU."""

import jax.numpy as jnp

from pipejax.train_step._update import select

from ..helpers import assert_bits_equal


def test_select_takes_all_of_one_side():
    new, old = {"a": jnp.ones(3)}, {"a": jnp.array([jnp.nan, 2, 3])}
    assert_bits_equal(select(jnp.array(True), new, old), new)
    assert_bits_equal(select(jnp.array(False), new, old), old)
