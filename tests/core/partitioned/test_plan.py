"""Tests which updates can run on pieces, and in how many levels."""

import jax
import jax.numpy as jnp
import optax
import pytest

from pipejax._core.partitioned import NotElementwiseError, on_partitions

from .updates import DEVICES, planned

REFUSED = {
    "muon": (optax.contrib.muon(1e-3), "transpose"),
    "flattened": (optax.flatten(optax.adam(1e-3)), "reshape"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_update_names_its_operation(name):
    tx, operation = REFUSED[name]
    with pytest.raises(NotElementwiseError, match=f"^{operation}$"):
        planned(tx)


def test_update_without_sums_has_one_level():
    _, _, _, program = planned(optax.adamw(1e-3))
    assert len(program.levels) == 1


def test_equal_elements_are_handed_on_as_a_number():
    """An update by zeros hands on numbers, and no arrays of zeros."""

    def update(x):
        zeros = jnp.zeros_like(x)
        moment = 0.1 * zeros**2 + jnp.where(jnp.sum(x) > 0, 0.5, 0.25) * zeros
        return x * jnp.sqrt(moment) / jnp.sum(x - moment)

    x = jax.ShapeDtypeStruct((8,), jnp.float32)
    program = on_partitions(update, [x], [(("data",),)], DEVICES)

    def handed_on(piece):
        value, found = [piece], []
        for level in range(len(program.levels)):
            value = program.run(level, value)
            found += value
        return found

    piece = jax.ShapeDtypeStruct((2,), jnp.float32)
    shapes = {each.shape for each in jax.eval_shape(handed_on, piece)}
    assert shapes == {(), (2,)}


def test_level_hands_on_only_values_read_later():
    """`x * 2` is read after the sum, `x + 1` only before it."""

    def update(x):
        return x * 2 / jnp.sum(x + 1)

    x = jax.ShapeDtypeStruct((8,), jnp.float32)
    program = on_partitions(update, [x], [(("data",),)], DEVICES)
    assert len(program.levels) == 2
    assert len(program.sums(0)) == 1
    assert list(map(len, program.handed)) == [1, 2, 1]
