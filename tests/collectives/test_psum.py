"""Tests the backend's all-reduce of arrays."""

import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax import codecs, collectives
from pipejax._internal.mesh import on_mesh
from pipejax.collectives import Layout, Summands, _psum

from .cases import KEY

SUMMANDS = Summands(
    coded=(np.ones((2, 3), np.float32), jnp.bfloat16([1, 2, 3, 4]), np.float32(5)),
    exact=(np.float32([6, 7]),),
)


def operands(threshold):
    """Returns the types of the summed arrays in the lowered program."""

    def local(summands):
        stages = collectives.psum(combine_threshold_bytes=threshold)(
            Layout.of(summands), "data"
        )
        return collectives.run(stages, summands)[0]

    program = jax.jit(on_mesh(local, pj.data_mesh(2), P(), P()))
    return re.findall(
        r'"stablehlo\.all_reduce".*?\}\) : \(tensor<([^>]*)>\) ->',
        program.lower(SUMMANDS).as_text(),
        re.DOTALL,
    )


@pytest.mark.parametrize(
    ("threshold", "wanted"),
    [
        (None, ["2x3xf32", "4xbf16", "f32", "2xf32"]),
        # Only arrays of fewer than 10 bytes travel together.
        (10, ["2x3xf32", "4xbf16", "3xf32"]),
        (25, ["9xf32", "4xbf16"]),
    ],
)
def test_arrays_are_summed_in_their_own_shapes_and_dtypes(threshold, wanted):
    assert operands(threshold) == wanted


@pytest.mark.parametrize("threshold", [-1, 1.5, True, "1 MiB"])
def test_combine_threshold_must_be_a_whole_number_of_bytes(threshold):
    with pytest.raises(ValueError, match="`combine_threshold_bytes` must be a whole"):
        pj.collectives.psum(combine_threshold_bytes=threshold)


def test_combine_threshold_beside_a_codec_is_refused():
    codec = codecs.error_feedback(codecs.power_sgd(1, KEY))
    with pytest.raises(
        ValueError, match=r"`combine_.*` must be None if .*codec, got 8:"
    ):
        pj.collectives.psum(codec, combine_threshold_bytes=8)


@pytest.mark.parametrize(
    ("platform", "processes", "wanted"),
    [("cpu", 1, 0), ("cpu", 2, 1 << 20), ("cuda", 2, 0), ("tpu", 1, 1 << 20)],
)
def test_mesh_chooses_the_combine_threshold_unless_given(platform, processes, wanted):
    """The choice reads only the platform and the number of processes from the mesh."""
    device = types.SimpleNamespace(platform=platform)
    mesh = types.SimpleNamespace(
        devices=np.array([device]), is_multi_process=processes > 1
    )
    found = pj.collectives.psum().on(mesh)
    assert found.combine_threshold_bytes == wanted
    assert (
        pj.collectives.psum(combine_threshold_bytes=8).on(mesh).combine_threshold_bytes
        == 8
    )
    feedback = pj.collectives.psum(codecs.error_feedback(codecs.power_sgd(1, KEY)))
    assert feedback.on(mesh) == feedback


@pytest.mark.parametrize("axis", ["data", ("host", "device")])
@pytest.mark.parametrize(
    ("again", "group"), [(False, "[[3, 2, 1, 0]]"), (True, "[[0, 3, 2, 1]]")]
)
def test_unmerged_sums_have_groups_in_other_orders(axis, again, group, monkeypatch):
    """On GPUs, XLA then sees another group, and the sum is the same."""
    monkeypatch.setattr(_psum, "_merges", lambda _: True)
    mesh = pj.data_mesh(4, axis_name=axis, hosts=None if axis == "data" else 2)
    psum = pj.collectives.psum()
    psum = psum.unmerged() if again else psum
    layout = Layout((), (jax.ShapeDtypeStruct((1,), jnp.float32),))

    def local(x):
        stages = psum(layout, axis)
        return collectives.run(stages, Summands((), (x,)), {})[0].exact[0]

    lowered = jax.jit(on_mesh(local, mesh, P(axis), P())).lower(
        jnp.float32([1, 2, 3, 6])
    )
    assert group in lowered.as_text()
    assert lowered.compile()(jnp.float32([1, 2, 3, 6])).tolist() == [12]


@pytest.mark.parametrize("threshold", [None, 0, 64, 1 << 20])
def test_sum_is_the_same_for_any_grouping(threshold):
    def loss_fn(params, batch):
        return sum((x * batch.mean()).sum() for x in params)

    train = pj.make_train_step(
        loss_fn,
        optax.sgd(1.0),
        mesh=pj.data_mesh(2),
        width=1,
        all_reduce=pj.collectives.psum(combine_threshold_bytes=threshold),
    )
    params = [np.zeros(shape, np.float32) for shape in ((3, 2), (), (40,))]
    state, _ = train.step(train.init(params), np.float32([1, 2, 3, 6]))
    for leaf in state.params:
        np.testing.assert_array_equal(leaf, np.full(leaf.shape, -3, np.float32))
