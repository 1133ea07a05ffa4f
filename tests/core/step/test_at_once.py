"""Tests what a codec keeps of each gradient, exchanged at once, against a recursion."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pipejax as pj
from pipejax import codecs, collectives
from pipejax._core.message import parted_states

from ...grid import grid
from ...helpers import (
    OPTIMIZERS,
    assert_bits_equal,
    batches,
    init_params,
    loss_fn,
    trajectory,
)
from ...reference import mean, split
from ...train_step.refusals import refused
from .parts import (
    PARAMS,
    STEPS,
    groups,
    noting_norm,
    trained,
    with_and_without_a_restart,
)

FULL = pytest.mark.full
WORKERS = 4
KEY = jax.random.key(1)
RANK_1, ALL_RANKS = codecs.power_sgd(1, KEY), codecs.power_sgd(7, KEY)
FEEDBACK = collectives.two_shot(codecs.error_feedback(codecs.int8(8)))
MATRICES = {"hidden": (5, 7), "out": (7, 3)}


def make(tx=OPTIMIZERS["adamw"], *, loss=loss_fn, devices=WORKERS, **settings):
    settings = {"at_once": RANK_1, "mesh": pj.data_mesh(devices)} | settings
    return pj.make_train_step(loss, tx, **settings)


def first_factors(train):
    """Returns the random factors of the codec before the first step."""
    _, states = parted_states(train.init(init_params()).in_flight.codec_states)
    vector = np.asarray(states["psum"]).reshape(WORKERS, -1)[0]
    ends = np.cumsum([columns for _, columns in MATRICES.values()])
    parts = np.split(vector, ends[:-1])
    return {name: part[:, None] for name, part in zip(MATRICES, parts, strict=True)}


def kept(gradient, factors):
    """Returns the part of rank 1 of a gradient, and the next factors."""
    part, after = dict(gradient), {}
    for name in MATRICES:
        matrix = np.asarray(gradient[name], np.float64)
        p = matrix @ factors[name]
        p /= np.linalg.norm(p)
        after[name] = matrix.T @ p
        part[name] = (p @ after[name].T).astype(np.float32)
    return part, after


def by_hand(tx, data, factors, *, width, warmup_steps=0):
    """Returns the parameters after every step and after the drain."""
    grad = jax.jit(jax.grad(loss_fn))
    w = init_params()
    s, queue, history = tx.init(w), [], []

    def update(g, s, w):
        u, s = tx.update(g, s, w)
        return optax.apply_updates(w, u), s

    for t, batch in enumerate(data):
        g = mean([grad(w, share) for share in split(batch, WORKERS)])
        part, factors = kept(g, factors)
        queue.append(jax.tree.map(np.subtract, g, part))
        if t < warmup_steps or len(queue) == width:
            part = jax.tree.map(np.add, part, queue.pop(0))
        w, s = update(part, s, w)
        history.append(w)
    for rest in queue:
        w, s = update(rest, s, w)
    return [*history, w]


@grid(
    1,
    name=["momentum", "adamw", "clip+adamw"],
    width=[2, 3],
    executor=["fused", "host"],
    warmup_steps=[0, 2],
)
def test_training_equals_the_recursion_by_hand(name, width, executor, warmup_steps):
    tx, data = OPTIMIZERS[name], batches(STEPS)
    train = make(tx, width=width, executor=executor, warmup_steps=warmup_steps)
    expected = by_hand(
        tx, data, first_factors(train), width=width, warmup_steps=warmup_steps
    )
    found = trajectory(train, init_params(), data)
    # Adam divides by the square root of squares, which are close to 0 at first.
    chex.assert_trees_all_close(found, expected, rtol=0, atol=4e-5)


@pytest.mark.parametrize("executor", ["fused", "host"])
def test_all_ranks_at_once_are_synchronous_training(executor):
    train = make(OPTIMIZERS["momentum"], at_once=ALL_RANKS, executor=executor)
    found = trajectory(train, init_params(), batches(STEPS), drain=False)
    plain = make(OPTIMIZERS["momentum"], width=1)
    wanted = trajectory(plain, init_params(), batches(STEPS), drain=False)
    chex.assert_trees_all_close(found, wanted, rtol=0, atol=2e-6)


def test_gradients_are_not_predicted():
    """The loss of a step is that at its own parameters."""
    train, data = make(), batches(4)
    state = train.init(init_params())
    assert state.mean is None
    points = []
    for number, batch in enumerate(data):
        points.append(float(loss_fn(state.params, batch)))
        state, info = train.step(state, batch)
        if number:
            assert float(info.loss) == pytest.approx(points[-2], rel=1e-5)


SETTINGS = {
    "codec": {"all_reduce": FEEDBACK},
    "default": {},
    "width 3": {"width": 3},
    "acp_sgd": {"at_once": codecs.acp_sgd(1, KEY)},
    "random_k": {"at_once": codecs.random_k(0.2, KEY, scaled=False)},
    "microbatches": {"microbatches": 2},
    "donated": {"donate": True},
    "bfloat16": {"reduce_dtype": jnp.bfloat16},
    "warm-up": {"warmup_steps": 2},
}


@grid(0, name=SETTINGS)
def test_both_executors_have_the_same_bits(name):
    ends = (trained(make, executor=x, **SETTINGS[name]) for x in ("fused", "host"))
    assert_bits_equal(*ends)


def test_norm_equals_the_gradient_of_the_optimizer():
    train = make(optax.chain(noting_norm(), optax.sgd(0.1)))
    state = train.init(init_params())
    for t, batch in enumerate(batches(5)):
        state, info = train.step(state, batch)
        if t:
            assert info.grad_norm == pytest.approx(float(state.opt_state[0]), rel=1e-5)


def test_weights_divide_both_parts():
    """Devices of other weights give the step of one device with the whole batch."""

    def loss(params, batch):
        error = (batch["x"] @ params["w"] - batch["y"]) ** 2
        count = batch["keep"].sum()
        value = (error.sum(-1) * batch["keep"]).sum() / jnp.maximum(count, 1)
        return value, pj.Aux(weight=count)

    rng = np.random.default_rng(0)
    data = [
        {
            "x": rng.normal(size=(8, 3)).astype(np.float32),
            "y": rng.normal(size=(8, 2)).astype(np.float32),
            "keep": np.float32([1, 0, 1, 1, 0, 0, 1, 1]),
        }
        for _ in range(4)
    ]

    def run(devices, **settings):
        train = make(optax.sgd(0.1), loss=loss, devices=devices, **settings)
        state = train.init({"w": np.ones((3, 2), np.float32)}, batch=data[0])
        for batch in data:
            state, _ = train.step(state, batch)
        return train.drain(state)[0].params

    chex.assert_trees_all_close(run(4), run(1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("executor", ["fused", pytest.param("host", marks=FULL)])
def test_groups_exchange_the_ranks_of_their_shards(executor):
    """With all ranks, groups train synchronously."""
    tx, (mesh, sharded) = OPTIMIZERS["momentum"], groups()
    settings = dict(mesh=mesh, axis_name="host", executor=executor, at_once=ALL_RANKS)
    found = trajectory(make(tx, **settings), sharded, batches(4), drain=False)[-1]
    alone = make(tx, devices=2, width=1)
    wanted = trajectory(alone, PARAMS, batches(4), drain=False)[-1]
    chex.assert_trees_all_close(found, wanted, rtol=0, atol=4e-6)


def test_groups_lose_nothing_of_the_ranks_of_their_shards():
    """The loss is linear, so that no gradient depends on when others are applied."""
    mesh, sharded = groups()
    patterns = jax.tree.map(lambda w: jnp.cos(jnp.arange(w.size * 1.0)), PARAMS)

    def loss(params, batch):
        dots = jax.tree.map(lambda w, c: w.reshape(-1) @ c, params, patterns)
        return batch["x"].mean() * sum(jax.tree.leaves(dots))

    def run(**settings):
        train = make(optax.sgd(0.1), loss=loss, **settings)
        state, points = train.init(sharded), []
        for batch in batches(4):
            state, _ = train.step(state, batch)
            points.append(jax.device_get(state.params))
        return train, state, [*points, jax.device_get(train.drain(state)[0].params)]

    on = {"mesh": mesh, "axis_name": "host"}
    train, state, found = run(executor="fused", **on)
    assert_bits_equal(found, run(executor="host", **on)[2])
    # Each of four devices has a column for every matrix of its shards, whose columns
    # number 4 and 3.
    _, states = parted_states(state.in_flight.codec_states)
    assert sum(leaf.size for leaf in jax.tree.leaves(states)) == 4 * (4 + 3)
    wanted = run(at_once=None, width=1, **on)[2]
    chex.assert_trees_all_close(found[-1], wanted[-1], rtol=0, atol=1e-5)
    assert not np.allclose(found[0]["hidden"], wanted[0]["hidden"], atol=1e-5)
    assert not np.allclose(found[0]["hidden"], PARAMS["hidden"], atol=1e-5)
    del train


def test_restored_run_continues_bit_for_bit(tmp_path):
    assert_bits_equal(*with_and_without_a_restart(make, tmp_path / "run"))


def test_transfers_list_the_rounds_of_the_codec_first():
    train = make()
    found = train.transfers(train.abstract_state(init_params()), batches(1)[0])
    # Whether the codec may replace its state, P of both matrices, and then Q, the bias
    # and the loss.
    assert [x.bytes for x in found[:3]] == [4, 4 * (5 + 7), 4 * (7 + 3 + 7 + 1)]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"at_once": codecs.int8()}, "`at_once` must be a linear codec"),
        ({"at_once": 4}, "`at_once` must be a linear codec"),
        (
            {"at_once": codecs.error_feedback(RANK_1)},
            "`at_once` must be a linear codec .* no error feedback",
        ),
        (
            {"at_once": codecs.random_k(0.5, KEY)},
            "`at_once` must be a linear codec that keeps a part",
        ),
        ({"shard_optimizer": True}, "`at_once` must be None with shard_optimizer=True"),
        ({"delayed": {"hidden": True}}, "`at_once` must be None with `delayed`"),
    ],
)
def test_unfit_settings_are_refused(settings, says):
    with refused(says):
        make(**settings)
