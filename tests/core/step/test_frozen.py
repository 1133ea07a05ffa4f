"""Tests that frozen parameters cost nothing, against an adapter that trains alone."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax._core.step._frozen import moves, without_frozen

from ...helpers import assert_bits_equal
from ...train_step.refusals import refused

FULL = pytest.mark.full
SIZE, RANK, STEPS = 8, 2, 5


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


BASE = {"w": normal(0, SIZE, SIZE), "b": normal(1, SIZE)}
ADAPTER = {"down": normal(2, SIZE, RANK), "up": normal(3, RANK, SIZE)}
PARAMS = {"adapter": ADAPTER, "base": BASE}
BATCHES = [{"x": normal(4 + n, 8, SIZE), "y": normal(14 + n, 8)} for n in range(STEPS)]


def loss(params, batch):
    base, adapter = params["base"], params["adapter"]
    weights = base["w"] + adapter["down"] @ adapter["up"]
    hidden = jnp.tanh(batch["x"] @ weights + base["b"][None, :])
    return jnp.mean((hidden.sum(-1) - batch["y"]) ** 2)


def loss_of_adapter(adapter, batch, *, model_state):
    value = loss({"adapter": adapter, "base": model_state}, batch)
    return value, pj.Aux(model_state=model_state)


def labels(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: path[0].key, params)


def partition(tx):
    """Returns an optimizer that trains the adapter by `tx`, and freezes the base."""
    return optax.partition({"adapter": tx, "base": optax.set_to_zero()}, labels)


def make(loss, tx, *, grouped=False, **settings):
    """Makes a train step of two devices, or of two groups of two devices."""
    mesh = pj.data_mesh(2)
    if grouped:
        mesh = pj.data_mesh(4, axis_name=("host", "fsdp"), hosts=2)
        settings["axis_name"] = "host"
    return pj.make_train_step(loss, tx, mesh=mesh, **settings)


def placed(train, tree):
    if "fsdp" not in train.mesh.axis_names:
        return tree
    return jax.device_put(tree, NamedSharding(train.mesh, P("fsdp")))


def run(train, state, batches=BATCHES):
    for batch in batches:
        state, _ = train.step(state, batch)
    return state


def sizes(tree):
    return sorted(x.size for x in jax.tree.leaves(tree))


FEEDBACK = pj.collectives.two_shot(pj.codecs.error_feedback(pj.codecs.int8()))
CASES = [
    (1, {}),
    (2, {}),
    (2, {"grouped": True}),
    (2, {"weight_prediction": "own"}),
    (2, {"executor": "host", "microbatches": 2}),
    (3, {"all_reduce": FEEDBACK, "reduce_dtype": jnp.bfloat16}),
    (3, {"executor": "host", "all_reduce": FEEDBACK}),
    (2, {"executor": "host", "grouped": True}),
    (3, {"microbatches": 2, "donate": True}),
    (3, {"weight_prediction": False, "executor": "host"}),
]


@pytest.mark.parametrize(
    ("width", "settings"),
    [pytest.param(*case, marks=FULL if i > 1 else ()) for i, case in enumerate(CASES)],
)
def test_adapter_trains_like_an_adapter_alone(width, settings):
    """The same bits, of the same bytes, with the same arrays in flight."""
    adam = optax.adam(0.01)
    found = []
    for fn, tx, params, base in (
        (loss, partition(adam), PARAMS, None),
        (loss_of_adapter, adam, ADAPTER, BASE),
    ):
        train = make(fn, tx, width=width, **settings)
        params, base = (placed(train, tree) for tree in (params, base))
        state = train.init(params, model_state=base, batch=BATCHES[0])
        sent = train.transfers(state, BATCHES[0])
        state = run(train, state)
        kept = sizes((state.in_flight, state.mean))
        state, infos = train.drain(state)
        found.append((state, sent, kept, jax.device_get(infos)))
    (state, *costs, infos), (alone, *wanted, infos_alone) = found
    if not settings.get("grouped"):  # XLA also splits the base, and lists it
        assert costs == wanted
    assert costs[1] == wanted[1]
    assert_bits_equal(*jax.device_get((state.params["adapter"], alone.params)))
    assert_bits_equal(state.params["base"], BASE)
    assert_bits_equal(infos, infos_alone)
    assert bool(infos[-1].applied) if infos else True


@pytest.mark.parametrize(
    ("width", "grouped"),
    [(2, False), pytest.param(1, True, marks=FULL), pytest.param(3, True, marks=FULL)],
)
def test_sharded_optimizer_trains_the_same_adapter(width, grouped):
    found = []
    for sharded in (False, True):
        settings = {"shard_optimizer": sharded, "weight_prediction": False}
        tx = partition(optax.adam(0.01))
        train = make(loss, tx, width=width, grouped=grouped, **settings)
        state = train.init(placed(train, PARAMS), batch=BATCHES[0])
        state = run(train, state)
        # On two devices: the adapter's gradients and the loss, and nothing of the base.
        in_flight = [2] * (width - 1) + [2 * RANK * SIZE] * 2 * (width - 1)
        assert sizes(state.in_flight.pending) == in_flight
        found.append(jax.device_get(train.drain(state)[0].params))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), *found)


def test_sharded_optimizer_is_planned_on_one_device():
    tx = partition(optax.adam(0.01))
    train = pj.make_train_step(
        loss, tx, mesh=pj.data_mesh(1), shard_optimizer=True, donate=False
    )
    state = run(train, train.init(PARAMS))
    assert_bits_equal(train.drain(state)[0].params["base"], BASE)


def test_frozen_gradients_are_not_computed():
    """The programs have the same matmuls as that of an adapter alone."""
    adam, found = optax.adam(0.01), []
    for fn, tx, params, base in (
        (loss, partition(adam), PARAMS, None),
        (loss_of_adapter, adam, ADAPTER, BASE),
    ):
        train = make(fn, tx)
        state = train.init(params, model_state=base, batch=BATCHES[0])
        found.append(train.lower(state, BATCHES[0]).as_text().count("dot_general"))
    assert found[0] == found[1]


def test_nan_in_a_frozen_gradient_skips_nothing():
    def broken(params, batch):
        return loss(params, batch) + jnp.sqrt(0 * params["base"]["w"]).sum()

    for skips in (False, True):
        train = make(broken, partition(optax.sgd(0.1)), skip_nonfinite=skips)
        state, _ = train.drain(run(train, train.init(PARAMS)))
        assert int(state.skipped) == 0
        assert_bits_equal(state.params["base"], BASE)
    train = make(broken, optax.sgd(0.1))
    assert int(train.drain(run(train, train.init(PARAMS)))[0].skipped) == STEPS


def test_steps_inside_a_scan_carry_the_same_form():
    train = make(loss, partition(optax.adam(0.01)), executor="fused")
    data = jax.tree.map(lambda *x: np.stack(x), *BATCHES)
    scanned, _ = jax.jit(lambda s, d: jax.lax.scan(train.step, s, d))(
        train.init(PARAMS), data
    )
    stepped = run(train, train.init(PARAMS))
    assert jax.tree.structure(scanned) == jax.tree.structure(stepped)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
        scanned.params,
        stepped.params,
    )


CLIP = optax.clip_by_global_norm(1.0)
SGD = optax.sgd(0.1)
READS = {
    "all": (SGD, True),
    "partition": (partition(SGD), False),
    "clip inside": (partition(optax.chain(CLIP, SGD)), False),
    "clip before": (optax.chain(CLIP, partition(SGD)), True),
    "decay": (optax.chain(partition(SGD), optax.add_decayed_weights(-0.01)), False),
    "freeze": (
        optax.chain(
            SGD, optax.masked(optax.set_to_zero(), {"adapter": False, "base": True})
        ),
        False,
    ),
    "freeze after moments": (
        optax.chain(
            optax.adam(0.1),
            optax.masked(optax.set_to_zero(), {"adapter": False, "base": True}),
        ),
        True,
    ),
    "several steps": (optax.MultiSteps(partition(SGD), 2), True),
    "masked": (optax.masked(SGD, {"adapter": True, "base": False}), True),
    "none": (optax.set_to_zero(), True),
}


@pytest.mark.parametrize("name", READS)
def test_gradients_read_by_an_optimizer_are_kept(name, caplog):
    tx, reads = READS[name]
    with caplog.at_level(logging.WARNING, logger="pipejax"):
        found = without_frozen(tx, PARAMS)
        assert without_frozen(tx, PARAMS).keys() == found.keys()
    assert_bits_equal(found["adapter"], ADAPTER)
    assert found["base"] == (BASE if reads else {"w": None, "b": None})
    said = [record.getMessage() for record in caplog.records]
    if name in ("clip before", "freeze after moments", "several steps"):
        (message,) = said  # once, however often it is asked
        assert message.startswith("the gradients of 2 parameters, the first of params[")
        assert "inside the partition, as in optax.partition({'train'" in message
    else:
        assert not said


def test_decay_moves_a_frozen_parameter():
    tx, _ = READS["decay"]
    train = make(loss, tx, width=2)
    state, _ = train.drain(run(train, train.init(PARAMS)))
    wanted = jax.tree.map(lambda w: w * np.float32(0.99) ** STEPS, BASE)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5),
        state.params["base"],
        wanted,
    )


ANNEALED = {
    "constant": lambda _: -0.1,
    "schedule": lambda count: -0.1 / (1 + count),
    "late": lambda count: jnp.where(count < 3, 0.0, -0.1),
}


@pytest.mark.parametrize("name", ANNEALED)
@pytest.mark.parametrize("overlap", [0, 2])
def test_local_steps_keep_updates_without_a_gradient(name, overlap):
    rule = ANNEALED[name]

    def update(updates, count, params=None):
        del params
        moved = jax.tree.map(lambda x: jnp.full_like(x, rule(count)), updates)
        return moved, count + 1

    anneal = optax.GradientTransformation(lambda _: jnp.zeros((), jnp.int32), update)
    tx = optax.partition({"w": SGD, "t": anneal}, {"w": "w", "t": "t"})

    def heated(params, batch):
        return jnp.mean((params["w"][None] - batch) ** 2) * params["t"]

    params = {"w": jnp.zeros(2), "t": jnp.ones(())}
    settings = {"sync_every": 2, "overlap_steps": overlap}
    mesh = pj.data_mesh(2)
    local = pj.make_local_step(heated, tx, mesh=mesh, **settings)
    plain = pj.make_train_step(heated, tx, mesh=mesh, width=1)
    states = [train.init(params) for train in (local, plain)]
    for _ in range(STEPS):  # all groups have the same examples, and so the same mean
        states = [
            train.step(state, jnp.ones((4, 2)))[0]
            for train, state in zip((local, plain), states, strict=True)
        ]
    found, _ = local.drain(states[0])
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6),
        found.params,
        states[1].params,
    )


WRAPPED = {
    "alone": lambda tx: tx,
    "several steps": lambda tx: optax.MultiSteps(tx, 3),
    "finite": lambda tx: optax.apply_if_finite(tx, 3),
    "clipped": lambda tx: optax.chain(CLIP, tx),
    "injected": lambda tx: optax.inject_hyperparams(lambda rate: tx)(rate=0.1),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_wrapped_frozen_parameters_do_not_move(name):
    found = moves(WRAPPED[name](partition(optax.adamw(0.1))), PARAMS)
    wanted = {"adapter": True, "base": False}
    assert found == {
        k: jax.tree.map(lambda _, k=k: wanted[k], PARAMS[k]) for k in PARAMS
    }


def test_decayed_parameters_move():
    tx, _ = READS["decay"]
    assert all(jax.tree.leaves(moves(tx, PARAMS)))


def test_state_of_another_optimizer_is_refused():
    frozen, trained = make(loss, partition(SGD)), make(loss, partition_of_all())
    state = frozen.init(PARAMS)
    message = r"this `tx`, .*: `gradients\['base'\]\['b'\]` .*; got nothing"
    with refused(message):
        trained.step(state, BATCHES[0])
    with refused(message):
        trained.drain(state)


def partition_of_all():
    """Returns an optimizer whose state has the form of that of `partition(SGD)`."""
    return optax.partition({"adapter": SGD, "base": optax.identity()}, labels)
