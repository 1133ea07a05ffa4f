"""Every all-reduce: the sum, the same bits on every device, its stages counted."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax import collectives
from pipejax.codecs import int8
from pipejax.mesh import on_mesh

from ..helpers import batches, init_params, loss_fn

DEVICES = [1, 2, 3, 4, 5, 7, 8]


def summed(all_reduce, values, exact=0):
    """Row i of the result is what device i has; `values` [p, n]."""
    devices, n = values.shape
    mesh = pj.data_mesh(devices)

    def local(row):
        like = jax.ShapeDtypeStruct((n,), values.dtype)
        stages = all_reduce(like, "data", exact=exact)
        return collectives.run(stages, row[0])[None]

    return jax.jit(on_mesh(local, mesh, P("data"), P("data"))), values


def two_shot_ref(rows, exact):
    """The same in NumPy, over a list of blocks."""
    n = rows.shape[1] - exact
    chunk = 256 * max(1, -(-n // (len(rows) * 256)))
    padded = np.zeros((len(rows), chunk * len(rows)), np.float32)
    padded[:, :n] = rows[:, :n]

    def rounded(x):
        blocks = x.reshape(-1, 256)
        scale = np.abs(blocks).max(1, keepdims=True)
        unit = np.where(scale > 0, scale, 1).astype(np.float32)
        return (np.round(127 * (blocks / unit)) * (scale / np.float32(127))).reshape(-1)

    total = sum(rounded(row) for row in padded)
    return np.concatenate([rounded(total)[:n], rows[:, n:].sum(0)])


@pytest.mark.parametrize("n", [1, 255, 256, 1000])
@pytest.mark.parametrize("devices", DEVICES)
def test_psum(devices, n):
    values = np.arange(devices * n, dtype=np.float32).reshape(devices, n)
    program, values = summed(collectives.psum, values)
    got = np.asarray(program(values))
    np.testing.assert_array_equal(got, np.tile(values.sum(0), (devices, 1)))


@pytest.mark.parametrize(
    ("n", "exact"), [(1, 0), (300, 0), (1000, 3), (4, 4), (70, 69)]
)
@pytest.mark.parametrize("devices", DEVICES)
def test_two_shot(devices, n, exact):
    rng = np.random.default_rng(devices + n)
    values = rng.normal(size=(devices, n)).astype(np.float32)
    program, values = summed(collectives.two_shot, values, exact)
    got = np.asarray(program(values))
    for row in got[1:]:
        np.testing.assert_array_equal(row, got[0])
    # The reference adds and divides in another order: a few units in the last place,
    # which may carry a value over to the next of the 255 levels.
    level = 2 * devices * np.abs(values).max() / 127
    np.testing.assert_allclose(got[0], two_shot_ref(values, exact), atol=level)
    error = np.abs(got[0] - values.astype(np.float64).sum(0))
    bound = np.abs(values).max(1).sum() / 127  # half of it from each shot
    assert error[: n - exact].max(initial=0) <= bound * (1 + 1e-5)
    np.testing.assert_allclose(error[n - exact :], 0, atol=1e-5)


def test_two_shot_sends_two_collectives_of_a_quarter():
    """1.02 bytes an element each way, and 4 for what is exact; all as uint8."""
    values = np.ones((4, 4 * 1024 + 2), np.float32)
    program, values = summed(collectives.two_shot, values, exact=2)
    text = program.lower(values).as_text()
    moved = re.findall(r'stablehlo\.(all_\w+)".*?-> tensor<([\dx]+)xui8>', text)
    assert moved == [
        ("all_to_all", f"4x{int8.size(1024) + 4 * 2}"),
        ("all_gather", f"4x{int8.size(1024)}"),
    ]
    assert len(re.findall(r"stablehlo\.(all_|reduce_scatter|collective)", text)) == 2


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 299])
def test_not_finite_stays_not_finite(bad, place):
    values = np.ones((3, 300), np.float32)
    values[1, place] = bad
    program, values = summed(collectives.two_shot, values)
    got = np.asarray(program(values))
    assert not np.isfinite(got[:, place]).any()


def test_int8_error_and_bytes():
    rng = np.random.default_rng(0)
    x = (rng.normal(size=1024) * 10.0 ** rng.integers(-9, 9, size=1024)).astype("f4")
    x[256:512] = 0
    payload = int8.encode(jnp.asarray(x))
    assert payload.dtype == jnp.uint8
    assert payload.size == int8.size(1024) == 1024 + 16
    error = np.abs(np.asarray(int8.decode(payload)) - x).reshape(-1, 256)
    bound = np.abs(x).reshape(-1, 256).max(1) / 254
    assert (error.max(1) <= bound * (1 + 1e-5)).all()
    assert (error[1] == 0).all()


def with_metrics(params, batch):
    loss = loss_fn(params, batch)
    return loss, pj.Aux(metrics={"thousandfold": 1000 * loss})


@pytest.mark.parametrize("executor", ["fused", "host"])
@pytest.mark.parametrize("width", [1, 2, 3])
def test_two_shot_in_a_train_step(width, executor):
    """Near the exact run; loss and metrics to the last digits, for they stay exact."""
    runs = []
    for all_reduce in (collectives.psum, collectives.two_shot):
        train = pj.make_train_step(
            with_metrics,
            optax.sgd(0.05),
            mesh=pj.data_mesh(4),
            width=width,
            all_reduce=all_reduce,
            executor=executor,
        )
        state = train.init(init_params(), batch=batches(1)[0])
        for batch in batches(width):
            state, info = train.step(state, batch)
        runs.append((info, train.drain(state)))
    (info, state), (rough, other) = runs
    # The first gradient is of the same parameters in both.
    np.testing.assert_allclose(rough.loss, info.loss, rtol=1e-6)
    for a, b in zip(
        jax.tree.leaves((rough.metrics, other.params)),
        jax.tree.leaves((info.metrics, state.params)),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-2)
    assert len(set(pj.replica_digest(other).values())) == 1


@pytest.mark.parametrize("microbatches", [1, 4])
def test_two_shot_is_woven_into_the_compute(microbatches):
    """A stage, work, a barrier, a stage, work, a barrier: matmuls on either side."""
    train = pj.make_train_step(
        loss_fn,
        optax.sgd(0.05),
        mesh=pj.data_mesh(4),
        microbatches=microbatches,
        all_reduce=collectives.two_shot,
    )
    (batch,) = batches(1)
    text = train.lower(train.init(init_params()), batch).as_text()
    order = re.findall(r"stablehlo\.(all_to_all|all_gather|dot_general|while)", text)
    gather = order.index("all_gather")
    work = {"dot_general", "while"}
    assert order[0] == "all_to_all"
    assert work & set(order[1:gather])
    assert work & set(order[gather + 1 :])
