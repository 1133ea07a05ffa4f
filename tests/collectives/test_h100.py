"""Tests programs for absent GPUs: what they send, and that a step hides all of it."""

import collections

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax import codecs
from pipejax._internal.mesh import on_mesh
from pipejax.collectives import hierarchical, two_shot

from .cases import ALGORITHMS, CODECS, allowed, case, summed

pytest.importorskip("jax_plugins.xla_cuda12")
pytest.importorskip("nvidia.cuda_nvcc")

from experiments import overlap

HOSTS = ("host", "device")
# One program for each algorithm, and one for each codec.
CELLS = [(a, "random_k" if a == "psum" else "int8") for a in ALGORITHMS]
CELLS += [("psum", "power_sgd+feedback")]
CELLS += [("two_shot", c) for c in CODECS if c != "int8" and allowed("two_shot", c)]
# `tests/internal/test_wire.py` asserts the same for the programs of CPUs.
QUICK = [("hierarchical", "int8"), ("two_shot", "sign+feedback")]


@pytest.mark.parametrize(
    ("algorithm", "codec"),
    [
        pytest.param(*cell, marks=() if cell in QUICK else pytest.mark.full)
        for cell in CELLS
    ],
)
def test_compiled_program_sends_the_transfers_of_the_stages(algorithm, codec):
    each = case(algorithm, codec, 8, 4000, exact=3)
    names = {"axis_name": each.axis, "hosts": each.hosts}
    mesh = pj.data_mesh(devices=pj.overlap.topology("h100:1x1x8"), **names)
    found, own = [], P(each.axis)

    def local(row, states):
        stages = each.all_reduce(each.layout, each.axis)
        found.extend(stages.transfers)
        total, states = summed(each.layout, stages, row[0], states)
        return total[None], states

    def init():
        return each.all_reduce(each.layout, each.axis).init()

    states = jax.eval_shape(on_mesh(init, mesh, (), own))
    vector = jax.ShapeDtypeStruct((8, 4003), "float32")
    program = jax.jit(on_mesh(local, mesh, own, own))
    report = pj.overlap.inspect(program, vector, states)
    sent = [(c.kind, c.bytes, c.wire_bytes) for c in report.collectives]
    said = [(x.kind, x.bytes, x.wire_bytes) for x in found]
    assert collections.Counter(sent) == collections.Counter(said)
    if algorithm != "psum":
        dtypes = {dtype for c in report.collectives for dtype in c.dtypes}
        assert dtypes <= {"u8", "u16", "u32"}


@pytest.mark.full  # in the quick run, tests/core/step/test_delayed.py compiles for H100
@pytest.mark.parametrize("name", ["two_shot", "hierarchical"])
@pytest.mark.parametrize("target", ["h100:1x1x8", "h100:1x8x8"])
def test_every_collective_is_asynchronous_and_overlaps_matmuls(name, target):
    """In a step of width 2, every collective is asynchronous and overlaps matmuls."""
    hosts = 2 if target == "h100:1x1x8" else 8
    coded = two_shot(codecs.int8())
    settings = {"mesh": pj.data_mesh(devices=pj.overlap.topology(target))}
    settings |= {"all_reduce": coded}
    if name == "hierarchical":
        devices = pj.overlap.topology(target)
        mesh = pj.data_mesh(axis_name=HOSTS, hosts=hosts, devices=devices)
        settings = {"mesh": mesh, "axis_name": HOSTS}
        settings |= {"all_reduce": hierarchical(outer=coded)}
    problem = overlap.plain_problem("mlp", settings["mesh"].size)
    train = pj.make_train_step(problem.loss_fn, optax.sgd(0.1), width=2, **settings)
    state = jax.eval_shape(train.init, problem.params)
    found = pj.overlap.inspect(train, state, problem.batch).collectives
    kinds = ["all-to-all", "all-gather"]
    if name == "hierarchical":
        kinds = ["all-to-all", *kinds, "all-gather"]
        *found, within = found
        # The gradients of this step are averaged inside hosts when all are computed.
        assert (within.kind, within.group_size) == (
            "all-reduce",
            train.mesh.size // hosts,
        )
    assert [c.kind for c in found] == kinds
    assert all(c.asynchronous for c in found)
    assert all(c.share > 0 for c in found), [c.share for c in found]


def test_collectives_of_the_loss_leave_the_gradients_hidden():
    """XLA would merge the loss's first collective with the gradients' all-reduce."""

    def normed(x):
        parts = (y.mean(0, keepdims=True) for y in (x, x**2))
        mean, square = (lax.pmean(part, "data") for part in parts)
        return (x - mean) * lax.rsqrt(square - mean**2 + 1e-5)

    def loss_fn(params, batch):
        x = batch
        for layer in params:
            x = jax.nn.relu(normed(x @ layer))
        return jnp.mean(x**2)

    mesh = pj.data_mesh(devices=pj.overlap.topology("h100:1x8x1"))
    train = pj.make_train_step(loss_fn, optax.sgd(0.1), mesh=mesh)
    params = [jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 3
    batch = jax.ShapeDtypeStruct((8 * 128, 512), jnp.float32)
    state = jax.eval_shape(train.init, params)
    found = pj.overlap.inspect(train, state, batch).collectives
    gradients = max(found, key=lambda collective: collective.bytes)
    assert gradients.asynchronous
    assert gradients.share > 0.5
