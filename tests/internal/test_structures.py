"""Tests that structures are compared without static data."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from pipejax._internal.structures import (
    alike,
    containers,
    form_of,
    identical,
    like_optimizer,
    restructured,
    select,
)

from ..helpers import assert_bits_equal


@jax.tree_util.register_pytree_node_class
class Model:
    """Has a static function."""

    def __init__(self, w, act):
        self.w, self.act = w, act

    def tree_flatten(self):
        return (self.w,), self.act

    @classmethod
    def tree_unflatten(cls, act, children):
        return cls(*children, act)


def test_static_data_does_not_count():
    one, two = (Model(jnp.ones(2), lambda x: x) for _ in range(2))
    assert jax.tree.structure(one) != jax.tree.structure(two)
    assert alike(one, two)
    assert containers(one) == "Model[*]"
    assert "0x" in str(jax.tree.structure(one))  # the text has an address
    found = restructured(two, one)
    assert found.act is one.act
    assert found.w is two.w


def test_containers_and_paths_count():
    tx = optax.adam(0.1)
    state = tx.init({"w": np.ones(2)})
    assert not alike(state, list(state))
    assert not alike(state, tx.init({"v": np.ones(2)}))
    assert not alike((), ((),))
    assert not alike({"a": None}, {"a": 1})
    assert not alike((optax.EmptyState(),), ((),))


def test_form_is_a_key_for_shape_dtype_and_paths():
    forms = {form_of({"a": np.float32(1)}), form_of({"a": jnp.float32(2)})}
    assert len(forms) == 1
    assert form_of({"a": np.ones(1)}) not in forms
    assert form_of({"b": np.float32(1)}) not in forms
    assert form_of(jax.random.key(0)) == form_of(jax.random.key(1))


def test_arrays_with_equal_values_are_not_identical():
    x = jnp.zeros(3)
    assert identical({"a": x}, {"a": x})
    assert not identical({"a": x}, {"a": jnp.zeros(3)})
    assert not identical({"a": x}, {"a": x, "b": x})


class Scaled(NamedTuple):
    """Has the name of a field of an optimizer's state."""

    scale: Any
    w: Any


def test_counter_with_the_name_of_a_parameter_belongs_to_none():
    params = Scaled(jnp.float32(1), jnp.ones(2))
    tx = optax.chain(optax.scale_by_adam(), optax.contrib.reduce_on_plateau())
    adam, plateau = like_optimizer(tx.init(params), params, ["s", "w"], "none")
    assert adam.mu == adam.nu == Scaled("s", "w")
    assert adam.count == "none"
    assert set(plateau) == {"none"}
    masked = optax.masked(optax.trace(0.9), Scaled(True, False)).init(params)
    assert jax.tree.leaves(like_optimizer(masked, params, ["s", "w"], "none")) == ["s"]


def test_select_takes_all_of_one_side():
    """Accelerators select where a CPU branches."""
    new, old = {"a": jnp.ones(3)}, {"a": jnp.array([jnp.nan, 2, 3])}
    assert_bits_equal(select(jnp.array(True), new, old), new)
    assert_bits_equal(select(jnp.array(False), new, old), old)
