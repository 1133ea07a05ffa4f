"""Tests that devices see whether all of them make the same call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax import collectives
from pipejax._core.message import averaging, check_alike, mark_of, marked
from pipejax._internal.mesh import on_mesh

from .example import message

STEP, OTHER, DRAIN = (
    mark_of(batch) for batch in ((np.zeros(8),), (np.zeros(4),), None)
)


@pytest.mark.parametrize(
    ("marks", "alike"),
    [
        ([STEP] * 4, [True] * 4),
        ([DRAIN] * 4, [True] * 4),
        ([STEP, STEP, OTHER, STEP], [False] * 4),
        ([STEP, DRAIN, STEP, DRAIN], [False] * 4),
    ],
)
@pytest.mark.parametrize("all_reduce", [collectives.psum(), collectives.ring()])
def test_device_sees_if_another_has_another_mark(all_reduce, marks, alike):
    def local(ranks, marks):
        def of(message):
            return averaging(message, jnp.array(True), all_reduce, "data")

        found, _ = marked(of, message(10.0 ** ranks[0]), marks[0], "data").run({})
        return found.alike, found.sum.passengers.values[None]

    mapped = on_mesh(local, pj.data_mesh(4), (P("data"), P("data")), P("data"))
    found, values = jax.jit(mapped)(jnp.arange(4.0), np.array(marks))
    assert found.tolist() == alike
    np.testing.assert_array_equal(values, np.tile([1111, 2222], (4, 1)))


def test_mark_is_of_shapes_and_dtypes():
    forms = [(8, "float32"), (4, "float32"), (8, "int32"), ((8, 1), "float32")]
    assert len({mark_of({"x": np.zeros(*form)}) for form in forms}) == len(forms)
    shapes = jax.ShapeDtypeStruct((8,), jnp.float32)
    assert mark_of(np.ones(8, np.float32)) == mark_of(shapes)


def test_other_mark_is_an_error():
    check_alike(None)
    check_alike(jnp.array([True]))
    with pytest.raises(ValueError, match=r"`train\.step` and `train\.drain` must be"):
        check_alike(jnp.array([False]))
