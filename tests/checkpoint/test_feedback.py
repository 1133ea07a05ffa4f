"""Tests residuals: every bit on the same devices, zero and a log record on others."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax import checkpoint, codecs, collectives

from ..grid import thinned
from ..helpers import assert_bits_equal

FEEDBACK = {
    "int8": collectives.two_shot(codecs.error_feedback(codecs.int8(8))),
    "top_k": collectives.ring(codecs.error_feedback(codecs.top_k(0.25))),
    "power_sgd": collectives.psum(
        codecs.error_feedback(codecs.power_sgd(1, jax.random.key(0)))
    ),
}
AXES = ("host", "fsdp")
ROWS = {"w": P("fsdp"), "v": P(None, "fsdp")}


def loss_fn(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["w"])
    return jnp.mean((hidden @ params["v"] - batch["y"]) ** 2)


def batches(count):
    rng = np.random.default_rng(0)
    shapes = {"x": (24, 8), "y": (24, 4)}
    return [
        {k: rng.normal(size=v).astype(np.float32) for k, v in shapes.items()}
        for _ in range(count)
    ]


@functools.cache
def made(shape, codec, *, sharded=False, executor="auto", split="rows"):
    """Returns a train step on groups of devices, and parameters.

    Args:
      shape: Number of groups, and of devices in each. `None` stands for no groups.
      codec: The all-reduce, by its name in `FEEDBACK`.
      sharded: Whether the optimizer is sharded.
      executor: As for `make_train_step`.
      split: Whether the first parameter is split by rows or by columns.
    """
    groups, inner = shape
    given = {
        "w": np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8),
        "v": np.linspace(1, -1, 32, dtype=np.float32).reshape(8, 4),
    }
    mesh, axis_name = pj.data_mesh(groups), "data"
    if inner is not None:
        mesh = pj.data_mesh(groups * inner, axis_name=AXES, hosts=groups)
        axis_name = "host"
        specs = ROWS if split == "rows" else {"w": P(None, "fsdp"), "v": P("fsdp")}
        places = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
        given = jax.device_put(given, places)
    train = pj.make_train_step(
        loss_fn,
        optax.adam(1e-2),
        mesh=mesh,
        axis_name=axis_name,
        all_reduce=FEEDBACK[codec],
        shard_optimizer=sharded,
        executor=executor,
    )
    return train, given


def run(train, state, data):
    for batch in data:
        state, _ = train.step(state, train.batch(batch))
    train.join()
    return state


def kept(state):
    return jax.tree.map(np.asarray, state.in_flight.codec_states)


def restored(folder, state, train, given):
    with checkpoint.manager(folder) as manager:
        checkpoint.save(manager, state)
        return checkpoint.restore(manager, train, train.abstract_state(given)).state


def cases():
    """Yields what a train step takes; halves of an exchange do not take PowerSGD."""
    for executor in ("fused", "host"):
        for codec in FEEDBACK:
            for sharded in (False, True):
                for inner in (None, 2):
                    if not (sharded and codec == "power_sgd"):
                        yield executor, codec, sharded, inner


@pytest.mark.parametrize(("executor", "codec", "sharded", "inner"), thinned(cases(), 0))
def test_restored_residuals_have_the_same_bits_on_the_same_devices(
    tmp_path, caplog, executor, codec, sharded, inner
):
    shape = (4 if inner is None else 2, inner)
    train, given = made(shape, codec, sharded=sharded, executor=executor)
    data = batches(4)
    state = run(train, train.init(given), data[:2])
    assert any(x.any() for x in jax.tree.leaves(kept(state)))
    found = restored(tmp_path, state, train, given)
    assert_bits_equal(*jax.device_get((found, state)))
    # The other executor can continue from it, too.
    executor = {"fused": "host", "host": "fused"}[executor]
    other, given = made(shape, codec, sharded=sharded, executor=executor)
    with checkpoint.manager(tmp_path, read_only=True) as manager:
        like = other.abstract_state(given)
        again = checkpoint.restore(manager, other, like).state
    assert_bits_equal(*jax.device_get((again, state)))
    assert_bits_equal(
        *jax.device_get([run(train, x, data[2:]) for x in (found, state)])
    )
    assert "begin anew" not in caplog.text


FULL = pytest.mark.full
# The quick run has another number of groups, and the first groups.
OTHERS = [
    # the devices, a sharded optimizer, and how parameters are split now
    pytest.param((2, 2), (4, 2), False, "rows", marks=FULL),
    ((2, 2), (3, 2), True, "rows"),
    pytest.param((2, 2), (2, 4), False, "rows", marks=FULL),
    pytest.param((2, 2), (2, 2), True, "columns", marks=FULL),
    pytest.param((4, None), (2, None), True, "rows", marks=FULL),
    ((4, None), (2, 2), False, "rows"),
]


@pytest.mark.full
@pytest.mark.parametrize(("before", "now", "sharded", "split"), OTHERS)
def test_residuals_start_from_zero_on_other_devices(
    tmp_path, caplog, before, now, sharded, split
):
    """Everything else comes back: the drained parameters are those of the old run."""
    train, given = made(before, "int8", sharded=sharded)
    state = run(train, train.init(given), batches(3))
    lost = jax.tree_util.tree_leaves_with_path(state.in_flight.codec_states)
    other, given = made(now, "int8", sharded=sharded, split=split)
    with caplog.at_level(logging.WARNING, logger="pipejax"):
        found = restored(tmp_path, state, other, given)
    says = "residuals of error feedback start from zero"
    (record,) = (r for r in caplog.records if says in r.getMessage())
    for path, _ in lost:
        name = f"in_flight.codec_states{jax.tree_util.keystr(path)}"
        assert name in record.getMessage()
    if before[0] == now[0]:  # as many groups: what was in flight still is
        assert not any(x.any() for x in jax.tree.leaves(kept(found)))
        assert_bits_equal(*jax.device_get((found.params, state.params)))
        assert_bits_equal(
            *jax.device_get([x.in_flight.pending[0].gradients for x in (found, state)])
        )
    for leaf, form in zip(
        *map(jax.tree.leaves, (found, other.abstract_state(given))), strict=True
    ):
        assert leaf.shape == form.shape
        assert leaf.sharding.is_equivalent_to(form.sharding, leaf.ndim)
    run(other, found, batches(1))


def test_lost_residuals_of_a_dropped_codec_are_logged(tmp_path, caplog):
    """The run may also go on without a codec, and the record says what is lost."""
    train, given = made((4, None), "top_k")
    state = run(train, train.init(given), batches(2))
    mesh = pj.data_mesh(2)
    plain = pj.make_train_step(loss_fn, optax.adam(1e-2), mesh=mesh)
    found = restored(tmp_path, state, plain, given)
    assert found.in_flight.codec_states == {}
    assert "Not restored: in_flight.codec_states['hop 0'].residual" in caplog.text


def test_new_residuals_are_not_logged_as_lost(tmp_path, caplog):
    train = pj.make_train_step(loss_fn, optax.adam(1e-2), mesh=pj.data_mesh(4))
    other, given = made((2, None), "int8")
    state = run(train, train.init(given), batches(2))
    found = restored(tmp_path, state, other, given)
    assert any(x.size for x in jax.tree.leaves(kept(found)))
    assert "zero" not in caplog.text
