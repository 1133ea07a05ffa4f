"""Tests that a form knows shapes, dtypes and shardings of parameters."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax._core.rounds import Form, Shared
from pipejax._core.step import Common, Trainable
from pipejax._internal.mesh import on_mesh
from pipejax._internal.round_schedule import RoundSchedule
from pipejax._internal.shards import Shards

from ...groups import SPLITS, mesh_of, params, placed

PARAMS = {"a": np.ones((2, 3), np.float32), "b": np.zeros(4, np.float32)}


def form_of(params, mesh=None, name="data", specs=()):
    trained = Trainable(params, None, shards=Shards(params=specs))
    common = Common(trained, None, None, None, None)
    return Form.of(common, None, mesh or pj.data_mesh(2), name, RoundSchedule(3, 3))


def test_anchor_has_the_shapes_of_the_parameters():
    form = form_of(PARAMS)
    anchor = form.chunked(PARAMS)
    outer = tuple(map(optax.sgd(1.0).init, anchor))
    shared = Shared(anchor, outer, None, np.int32(0), form)
    assert jax.tree.map(np.shape, shared.params) == {"a": (2, 3), "b": (4,)}
    assert shared.params["a"].tolist() == PARAMS["a"].tolist()


def test_forms_are_equal_if_shapes_and_dtypes_are():
    other = PARAMS | {"b": np.zeros(4, np.float16)}
    assert form_of(PARAMS) == form_of(jax.tree.map(np.copy, PARAMS))
    assert form_of(PARAMS) != form_of(other)
    assert len({form_of(PARAMS), form_of(PARAMS), form_of(other)}) == 2


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("name", SPLITS)
def test_parameters_of_groups_come_back_with_their_sharding(name, kind):
    mesh, (inner, split) = mesh_of(2, name, kind), SPLITS[name]
    given = placed(mesh, name)
    specs = tuple(split.get(key, P()) for key in sorted(given))
    form = form_of(given, mesh, "host", specs)
    program = on_mesh(lambda tree: form.chunked(tree), mesh, P(), P(), "host")
    chunks = jax.jit(program)(given)
    for chunk in chunks:  # every element is in the chunks once
        assert chunk["float32"].sharding.spec == P(inner)
    held = np.concatenate([np.asarray(chunk["float32"]) for chunk in chunks])
    wanted = np.concatenate([leaf.ravel() for leaf in params().values()])
    assert np.sort(held[held != 0]).tolist() == np.sort(wanted[wanted != 0]).tolist()
    for key, leaf in form.params(chunks).items():
        assert np.array_equal(leaf, params()[key])
        assert leaf.sharding == given[key].sharding
