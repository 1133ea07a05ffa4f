"""Tests that a state knows the shapes of its parameters."""

import jax
import numpy as np
import optax

from pipejax._core.rounds import Form, Shared, chunked

PARAMS = {"a": np.ones((2, 3), np.float32), "b": np.zeros(4, np.float32)}


def test_anchor_has_the_shapes_of_the_parameters():
    anchor = chunked(PARAMS, 3)
    outer = tuple(map(optax.sgd(1.0).init, anchor))
    shared = Shared(anchor, outer, np.int32(0), Form(PARAMS))
    assert jax.tree.map(np.shape, shared.params) == {"a": (2, 3), "b": (4,)}
    assert shared.params["a"].tolist() == PARAMS["a"].tolist()


def test_forms_are_equal_if_shapes_and_dtypes_are():
    other = PARAMS | {"b": np.zeros(4, np.float16)}
    assert Form(PARAMS) == Form(jax.tree.map(np.copy, PARAMS))
    assert Form(PARAMS) != Form(other)
    assert len({Form(PARAMS), Form(PARAMS), Form(other)}) == 2
