"""Tests inputs of the loss that all devices share."""

import itertools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pipejax as pj

from ..grid import grid
from ..helpers import assert_bits_equal, batches, init_params, loss_fn
from ..reference import pipe_sgd

DEVICES = 4
FULL = pytest.mark.full


def distilled(params, batch, *, shared):
    """The loss is that of the batch and of a teacher's outputs, by a temperature."""
    targets = jnp.tanh(batch["x"] @ shared["teacher"])
    also = loss_fn(params, {"x": batch["x"], "y": targets})
    return loss_fn(params, batch) + shared["temperature"] * also


def by_rows(params, batch):
    """The twin: each example comes with a copy of what all devices share."""
    shared = jax.tree.map(lambda x: x[0], batch["shared"])
    return distilled(params, {"x": batch["x"], "y": batch["y"]}, shared=shared)


def teachers(count):
    rng = np.random.default_rng(3)
    return [
        {
            "teacher": rng.normal(size=(5, 3)).astype(np.float32),
            "temperature": 0.5**step,
        }
        for step in range(count)
    ]


def rows_of(batch, shared):
    return {
        **batch,
        "shared": jax.tree.map(
            lambda x: np.repeat(np.float32(x)[None], len(batch["x"]), axis=0), shared
        ),
    }


def make(loss=distilled, tx=None, *, mesh=None, **settings):
    mesh = mesh or pj.data_mesh(DEVICES)
    return pj.make_train_step(loss, tx or optax.adamw(1e-2), mesh=mesh, **settings)


def run(train, data, shared, **init):
    state = train.init(init_params(), **init)
    for batch, each in zip(data, shared, strict=True):
        state, _ = train.step(state, batch, shared=each)
    return train.drain(state)[0]


@pytest.mark.parametrize("executor", ["fused", pytest.param("host", marks=FULL)])
@pytest.mark.parametrize("width", [1, 2, pytest.param(3, marks=FULL)])
def test_each_step_computes_with_its_own_shared_input(executor, width):
    data, shared = batches(5), teachers(5)
    tx = optax.sgd(0.1, momentum=0.9)
    settings = {"width": width, "weight_prediction": False}
    train = make(tx=tx, executor=executor, **settings)
    found = run(train, data, shared)
    rows = list(map(rows_of, data, shared))
    wanted = pipe_sgd(
        by_rows, tx, init_params(), rows, workers=DEVICES, width=width, drain=True
    )
    chex.assert_trees_all_close(found.params, wanted[-1], rtol=1e-5, atol=1e-6)


SETTINGS = {
    "linearized": {},
    "microbatches": {"microbatches": 2},
    "bfloat16": {"compute_dtype": jnp.bfloat16},
    "sharded optimizer": {"shard_optimizer": True},
    "both": {"shard_optimizer": True, "microbatches": 2, "compute_dtype": jnp.bfloat16},
    "own": {"weight_prediction": "own"},
    "warmup": {"warmup_steps": 2},
}


# The other settings do not change how the loss is called.
QUICK = {("microbatches", "host"), ("bfloat16", "fused"), ("both", "fused")}


@pytest.mark.parametrize(
    ("name", "executor"),
    [
        pytest.param(*case, marks=() if case in QUICK else FULL)
        for case in itertools.product(SETTINGS, ("fused", "host"))
    ],
)
def test_loss_computes_as_if_every_example_had_a_copy(name, executor):
    """Each microbatch gets the whole, and `compute_dtype` casts it as the batch."""
    data, shared = batches(5), teachers(5)
    settings = {"executor": executor, **SETTINGS[name]}
    found = run(make(**settings), data, shared)
    rows = list(map(rows_of, data, shared))
    wanted = run(make(by_rows, **settings), rows, [None] * len(rows))
    chex.assert_trees_all_close(found.params, wanted.params, rtol=1e-5, atol=1e-6)


def mesh_of(groups=2, inner=2):
    types = (AxisType.Auto,) * 2
    devices = jax.devices()[: groups * inner]
    return jax.make_mesh(
        (groups, inner), ("host", "fsdp"), axis_types=types, devices=devices
    )


@grid(1, executor=["fused", "host"], sharded=[False, True])
def test_array_stays_sharded_inside_groups(executor, sharded):
    mesh, seen = mesh_of(), []
    data, shared = batches(4), teachers(4)

    def loss(params, batch, *, shared):
        seen.append(shared["teacher"].shape)
        return distilled(params, batch, shared=shared)

    place = NamedSharding(mesh, P(None, "fsdp"))
    wide = [
        {**x, "teacher": jax.device_put(np.tile(x["teacher"], 2)[:, :4], place)}
        for x in shared
    ]

    params = init_params()
    params["out"] = np.tile(params["out"], 2)[:, :4]
    for batch in data:
        batch["y"] = np.tile(batch["y"], 2)[:, :4]
    train = make(
        loss,
        mesh=mesh,
        axis_name="host",
        executor=executor,
        shard_optimizer=sharded,
    )
    state = train.init(params, batch=data[0], shared=wide[0])
    for batch, each in zip(data, wide, strict=True):
        state, _ = train.step(state, batch, each)
    assert (5, 4) in seen
    plain = make(mesh=pj.data_mesh(2), shard_optimizer=sharded)
    wanted = plain.init(params)
    for batch, each in zip(data, jax.device_get(wide), strict=True):
        wanted, _ = plain.step(wanted, batch, each)
    chex.assert_trees_all_close(
        train.whole_params(state), plain.whole_params(wanted), rtol=1e-5, atol=1e-6
    )
    text = train.lower(state, data[0], wide[0]).compile().as_text()
    # The parameter of the program is the shard of a device: 5 x 2 of 5 x 4 elements.
    assert "f32[5,2]" in text


def test_other_number_compiles_nothing_anew():
    weak = []

    def loss(params, batch, *, shared):
        weak.append(shared.weak_type)
        return shared * loss_fn(params, batch)

    train = make(loss)
    state = train.init(init_params())
    state, _ = train.step(state, batches(1)[0], 1.0)
    traced = len(weak)
    for number in (0.5, 2.0):
        state, _ = train.step(state, batches(1)[0], number)
    assert len(weak) == traced
    assert all(weak)
    # Another structure compiles a program of its own.
    state, _ = train.step(state, batches(1)[0], jnp.float32(1))
    assert len(weak) > traced
    assert not weak[-1]


def test_program_without_shared_inputs_has_none():
    plain = make(loss_fn)
    state = plain.init(init_params())
    batch = batches(1)[0]
    text = plain.lower(state, batch).as_text()
    assert text == plain.lower(state, batch, shared=None).as_text()
    leaves = jax.tree.leaves((state._replace(calls=None), batch))
    (main,) = re.findall(r"func.func public @main\((.*)\) ->", text)
    assert main.count("%arg") == len(leaves)


def test_step_can_be_traced():
    data, shared = batches(4), teachers(4)
    train = make()

    @jax.jit
    def all_steps(state, data, shared):
        return jax.lax.scan(lambda s, x: train.step(s, *x), state, (data, shared))

    stacked = [jax.tree.map(lambda *x: np.stack(x), *each) for each in (data, shared)]
    stacked[1]["temperature"] = stacked[1]["temperature"].astype(np.float32)
    state, _ = all_steps(train.init(init_params()), *stacked)
    wanted = run(train, data, shared).params
    found = train.drain(state)[0].params
    chex.assert_trees_all_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_key_is_the_same_on_all_devices():
    def loss(params, batch, *, shared):
        drawn = jax.random.uniform(jax.random.fold_in(shared, 1))
        return loss_fn(params, batch), pj.Aux(metrics={"drawn": drawn})

    key, (batch,) = jax.random.key(5), batches(1)
    train = make(loss, width=1)
    state = train.init(init_params(), batch=batch, shared=key)
    _, info = train.step(state, batch, key)
    wanted = jax.random.uniform(jax.random.fold_in(key, 1))
    assert float(info.metrics["drawn"]) == float(wanted)


def test_program_is_compiled_from_shapes():
    train, (batch,), (shared,) = make(), batches(1), teachers(1)
    form = jax.eval_shape(lambda x: x, shared)
    params = jax.eval_shape(lambda x: x, init_params())
    state = train.abstract_state(params, batch=batch, shared=form)
    text = train.lower(state, batch, form).as_text()
    real = train.init(init_params(), batch=batch, shared=shared)
    assert text == train.lower(real, batch, shared).as_text()
    assert train.transfers(state, batch, form) == train.transfers(real, batch, shared)


def test_written_buffer_is_copied():
    train, (batch,), (shared,) = make(), batches(1), teachers(1)
    state = train.init(init_params())
    mine = {**shared, "teacher": shared["teacher"].copy()}
    first, _ = train.step(state, batch, mine)
    mine["teacher"][:] = np.nan
    wanted, _ = train.step(state, batch, shared)
    assert_bits_equal(train.drain(first)[0].params, train.drain(wanted)[0].params)


# Tests of errors.


def step(train, shared, batch=None):
    return train.step(train.init(init_params()), batch or batches(1)[0], shared)


def test_array_split_over_the_data_is_refused():
    train = make(shard_optimizer=True, loss=lambda p, b, *, shared: loss_fn(shared, b))
    state = train.init(init_params(5) | {"out": np.ones((8, 3), np.float32)})
    with pytest.raises(ValueError, match=r"whole on every device.*whole_params"):
        train.step(state, batches(1)[0], state.params)
    split = jax.device_put(np.ones((4, 2)), train.config.data)
    with pytest.raises(ValueError, match=r"got `shared\['w'\]`, split by"):
        train.step(state, batches(1)[0], {"w": split})


def test_array_split_over_both_kinds_of_axes_is_refused():
    mesh = mesh_of()
    train = make(mesh=mesh, axis_name="host")
    split = jax.device_put(np.ones((4, 2)), NamedSharding(mesh, P("fsdp", "host")))
    with pytest.raises(ValueError, match=r"got `shared`, split by"):
        step(train, split)


@pytest.mark.parametrize("wrong", ["text", [None, "a"], {"a": object()}])
def test_leaf_other_than_an_array_is_refused(wrong):
    with pytest.raises(ValueError, match="`shared` must hold arrays of numbers"):
        step(make(), wrong)


def test_loss_without_the_keyword_is_refused():
    with pytest.raises(ValueError, match=r"keyword `shared`, which `train.step` was"):
        step(make(loss_fn), 1.0)
    with pytest.raises(ValueError, match=r"keyword `shared`, which `train.init` was"):
        make(loss_fn).init(init_params(), batch=batches(1)[0], shared=1.0)


def test_missing_input_is_refused():
    with pytest.raises(ValueError, match=r"`shared` must be given to `train.step`"):
        step(make(), None)
    with pytest.raises(ValueError, match=r"`shared` must be given to `train.init`"):
        make().init(init_params(), batch=batches(1)[0])


def test_donated_array_is_refused():
    def loss(params, batch, *, shared):
        return loss_fn(params, batch) + loss_fn(shared, batch)

    train, (batch,) = make(loss, donate=True), batches(1)
    state = train.init(init_params())
    with pytest.raises(ValueError, match=r"donate=True may overwrite; got `shared\["):
        train.step(state, batch, state.params)
    old, copies = state.params, train.whole_params(state)
    state, _ = train.step(state, batch, copies)
    assert not any(x.is_deleted() for x in jax.tree.leaves(copies))
    with pytest.raises(ValueError, match=r"donate=True may overwrite; got `shared\["):
        train.step(state, batch, old)
    train.step(state, batch, copies)


def test_donation_inside_a_traced_step_is_left_to_its_program():
    def loss(params, batch, *, shared):
        return loss_fn(params, batch) + loss_fn(shared, batch)

    (batch,), found = batches(1), []
    for donate in (False, True):
        train = make(loss, donate=donate)
        state = train.init(init_params())
        step = jax.jit(lambda s, b, train=train: train.step(s, b, s.params))
        found.append(train.drain(step(state, batch)[0])[0].params)
    assert_bits_equal(*found)


def test_batch_with_a_shared_row_is_pointed_here():
    with pytest.raises(ValueError, match=r"train.step\(state, batch, shared=...\)"):
        step(make(loss_fn), None, {"x": np.ones((8, 5)), "y": np.ones((4, 3))})


# Tests of `whole_params`.


@grid(1, dtype=[None, jnp.bfloat16], width=[1, 2])
def test_whole_parameters_equal_unsharded_parameters(width, dtype):
    data = batches(3)
    found = []
    for sharded in (False, True):
        settings = {"width": width, "compute_dtype": dtype, "weight_prediction": False}
        train = make(loss_fn, shard_optimizer=sharded, **settings)
        state = train.drain(run(train, data, [None] * 3))[0]
        whole = train.whole_params(state)
        for leaf in jax.tree.leaves(whole):
            assert leaf.is_fully_replicated
            assert leaf.dtype == np.float32
        found.append(whole)
    chex.assert_trees_all_close(*found, rtol=1e-5, atol=1e-6)


def playing(params, batch, *, model_state, shared):
    """Each player moves the one model state, which the loss of both depends on."""
    x = batch * model_state
    after = 0.5 * model_state + 0.5 * jnp.abs(batch).mean() * params
    return ((params * x - shared) ** 2).mean(), pj.Aux(model_state=after)


def played_by_hand(data, devices, width, rate):
    """Moves two numbers in turn; gradients and changes come `width - 1` steps late."""
    params, state, queues = [1.0, 0.5], 1.0, ([], [])

    def apply(i):
        nonlocal state
        gradients, changes = queues[i].pop(0)
        params[i] -= rate * np.mean(gradients)
        state += np.mean(changes)

    for batch in data:
        for i in (0, 1):
            shares, w, other = np.split(batch, devices), params[i], params[1 - i]
            own = [sum(c[d] for _, c in queues[i]) for d in range(devices)]
            at = [state + each for each in own]
            g = [
                np.mean(2 * x * s * (w * x * s - other))
                for x, s in zip(shares, at, strict=True)
            ]
            means = [np.abs(x).mean() for x in shares]
            after = [0.5 * s + 0.5 * m * w for s, m in zip(at, means, strict=True)]
            queues[i].append((g, np.subtract(after, at)))
            if len(queues[i]) == width:
                apply(i)
    for i in (0, 1):
        while queues[i]:
            apply(i)
    return params, state


@grid(1, width=[1, 2], devices=[1, 4])
def test_two_train_steps_hand_on_one_model_state(devices, width):
    data = np.random.default_rng(0).normal(size=(5, 8)).astype(np.float32)
    steps = [
        make(
            playing,
            optax.sgd(0.05),
            mesh=pj.data_mesh(devices),
            width=width,
            weight_prediction=False,
        )
        for _ in range(2)
    ]
    states = [
        step.init(start, model_state=jnp.ones(()), batch=data[0], shared=jnp.ones(()))
        for step, start in zip(steps, jnp.array([1.0, 0.5]), strict=True)
    ]

    def hand_on(i):
        states[1 - i] = states[1 - i]._replace(model_state=states[i].model_state)

    for batch in data:
        for i in (0, 1):
            other = states[1 - i].params
            states[i], _ = steps[i].step(states[i], batch, shared=other)
            hand_on(i)
    for i in (0, 1):
        states[i], _ = steps[i].drain(states[i])
        hand_on(i)
    params, model_state = played_by_hand(data, devices, width, 0.05)
    found = [states[0].params, states[1].params, states[0].model_state]
    np.testing.assert_allclose(found, [*params, model_state], rtol=1e-5)


@pytest.mark.parametrize("argument", ["params", "shared"])
def test_replicas_with_a_device_axis_are_refused(argument):
    """`pmap` splits its results over a mesh of its own."""
    train = make(mesh=pj.data_mesh(DEVICES))
    (batch,) = batches(1, size=8)
    given = {"params": init_params(), "shared": teachers(1)[0]}
    stacked = jax.tree.map(lambda x: jnp.stack([x] * DEVICES), given[argument])
    given[argument] = jax.pmap(lambda tree: tree)(stacked)
    with pytest.raises(ValueError, match=rf"`{argument}.* one replica of what `pmap`"):
        train.init(batch=batch, **given)
