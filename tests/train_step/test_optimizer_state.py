"""Tests a sharded optimizer whose state is unlike the parameters.

An array of the state is split as the values that an update writes into it. Every run is
compared with that of an unsharded optimizer.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax import checkpoint, codecs, collectives

from ..grid import each
from ..helpers import assert_bits_equal, normal_batches

SPLIT, WHOLE, COLUMNS = P("data"), P(), P(None, "data")


def params(empty=True):
    """Returns two of one shape, one that stays whole, and one without elements."""
    rng = np.random.default_rng(0)
    shapes = {"a": (5, 16), "b": (5, 16), "bias": (3,), "out": (16, 3)}
    shapes |= {"none": (0, 4)} if empty else {}
    return {k: rng.normal(size=s).astype(np.float32) / 3 for k, s in shapes.items()}


def loss_fn(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["a"]) * (batch["x"] @ params["b"])
    predicted = hidden @ params["out"] + params["bias"][None]
    return jnp.mean((predicted - batch["y"]) ** 2)


def batches(count):
    return normal_batches(count, size=16, inputs=5, outputs=3)


def by_columns(beta=0.9):
    """Scales "a" and "b" by a root mean square for each column, kept in a list."""

    def update(updates, state, params=None):
        del params
        squares = [jnp.mean(updates[k] ** 2, axis=0) for k in "ab"]
        state = [beta * s + (1 - beta) * x for s, x in zip(state, squares, strict=True)]
        scaled = {
            k: updates[k] / (0.1 + jnp.sqrt(s))[None]
            for k, s in zip("ab", state, strict=True)
        }
        return updates | scaled, state

    return optax.GradientTransformation(lambda p: [jnp.zeros(16)] * 2, update)


def by_rows():
    """Scales "a" by the largest gradient that each row has had, of shape (5, 1)."""

    def update(updates, state, params=None):
        del params
        state = jnp.maximum(state, jnp.abs(updates["a"]).max(1, keepdims=True))
        return updates | {"a": updates["a"] / state}, state

    return optax.GradientTransformation(lambda p: jnp.full((5, 1), 1e-3), update)


def listed(beta=0.5):
    """Keeps momentum as a list of leaves, and counts with a Python number."""

    def init(params):
        return [jnp.zeros_like(x) for x in jax.tree.leaves(params)], 0

    def update(updates, state, params=None):
        del params
        leaves, tree = jax.tree.flatten(updates)
        old = [beta * m + x for m, x in zip(state[0], leaves, strict=True)]
        return jax.tree.unflatten(tree, old), (old, state[1] + 1)

    return optax.GradientTransformation(init, update)


def two_speeds():
    """Keeps a fast and a slow momentum of "out" in one array with an axis more."""
    betas = jnp.array([0.5, 0.9])[:, None, None]

    def update(updates, state, params=None):
        del params
        state = {"by name": betas * state["by name"] + updates["out"][None]}
        return updates | {"out": state["by name"].mean(0)}, state

    return optax.GradientTransformation(
        lambda p: {"by name": jnp.zeros((2, 16, 3))}, update
    )


def crossed():
    """Adds to "a" the last gradient of "b", which it keeps in the place of "a"."""

    def update(updates, state, params=None):
        del params
        mixed = updates | {"a": updates["a"] + 0.1 * state["a"]}
        return mixed, {"a": updates["b"], "bias": state["bias"]}

    return optax.GradientTransformation(
        lambda p: {"a": jnp.zeros((5, 16)), "bias": jnp.ones(3)}, update
    )


def unlike():
    """Returns an optimizer of all of these, with the specs of its state."""
    tx = optax.chain(
        by_columns(), by_rows(), listed(), two_speeds(), crossed(), optax.sgd(0.02)
    )
    leaves = [COLUMNS, COLUMNS, WHOLE, WHOLE, SPLIT]
    specs = [SPLIT, SPLIT, WHOLE, *leaves, WHOLE, COLUMNS, COLUMNS, WHOLE]
    return tx, specs


def run(tx, devices, *, steps=4, width=2, empty=True, **options):
    mesh = pj.data_mesh(devices)
    options = {"weight_prediction": False, "width": width, **options}
    train = pj.make_train_step(loss_fn, tx, mesh=mesh, **options)
    state = train.init(params(empty))
    for batch in batches(steps):
        state, _ = train.step(state, batch)
    return train, train.drain(state)[0]


def assert_close(found, wanted):
    for a, b in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6, strict=True)


@pytest.mark.one_python
@pytest.mark.parametrize(
    ("devices", "executor"),
    [
        pytest.param(1, "fused", marks=pytest.mark.full),
        (4, "fused"),
        pytest.param(2, "host", marks=pytest.mark.full),
        pytest.param(8, "host", marks=pytest.mark.full),
    ],
)
def test_states_unlike_the_parameters_are_split(devices, executor):
    tx, specs = unlike()
    two_shot = collectives.two_shot()
    _, wanted = run(tx, devices, all_reduce=two_shot, executor=executor)
    train, found = run(tx, devices, shard_optimizer=True, executor=executor)
    pairs = ((x.params, x.opt_state) for x in (found, wanted))
    assert_close(*pairs)
    shapes = train.abstract_state(params()).opt_state
    for leaf, form in zip(
        *map(jax.tree.leaves, (found.opt_state, shapes)), strict=True
    ):
        assert leaf.sharding.is_equivalent_to(form.sharding, leaf.ndim)
    if devices == 4:
        leaves = jax.tree.leaves(found.opt_state)
        assert [x.sharding.spec for x in leaves] == specs


CONTAINERS = {
    "partition": optax.partition(
        {"x": optax.adam(0.01), "y": optax.sgd(0.01, 0.9)},
        {"a": "x", "b": "y", "bias": "x", "out": "y"},
    ),
    "masked": optax.masked(optax.adam(0.01), lambda p: {k: k != "b" for k in p}),
    "nested": optax.apply_if_finite(
        optax.MultiSteps(
            optax.chain(
                optax.clip_by_global_norm(0.5),
                optax.inject_hyperparams(optax.adamw)(learning_rate=0.01),
            ),
            2,
        ).gradient_transformation(),
        3,
    ),
    "average": optax.chain(optax.sgd(0.01), optax.ema(0.9)),
    "schedule free": optax.contrib.schedule_free_adamw(0.01),
    "factored": optax.adafactor(0.01, min_dim_size_to_factor=4),
    "sm3": optax.sm3(0.01),
    "novograd": optax.novograd(0.01),
}


# tests/core/pieces/test_program.py has the others in the quick run.
@pytest.mark.parametrize(
    "name",
    each(CONTAINERS, full=[name for name in CONTAINERS if name != "factored"]),
)
def test_states_in_containers_are_close_to_unsharded(name):
    tx = CONTAINERS[name]
    _, wanted = run(tx, 4, all_reduce=collectives.two_shot(), empty=False)
    _, found = run(tx, 4, shard_optimizer=True, empty=False)
    assert_close(found.params, wanted.params)
    assert_close(found.opt_state, wanted.opt_state)


@pytest.mark.parametrize("devices", [4, 1])
def test_state_in_one_long_vector_is_refused(devices):
    mesh, tx = pj.data_mesh(devices), optax.flatten(optax.adam(0.1))
    train = pj.make_train_step(loss_fn, tx, mesh=mesh, shard_optimizer=True)
    with pytest.raises(ValueError, match="got an operation `reshape`"):
        train.init(params())


def test_state_of_another_optimizer_of_equal_form_is_refused():
    """Its arrays are whole, where this optimizer would leave pieces."""
    still = optax.GradientTransformation(
        lambda p: [jnp.zeros(16)] * 2, lambda g, s, p=None: (g, s)
    )
    mesh = pj.data_mesh(4)
    trains = [
        pj.make_train_step(loss_fn, tx, mesh=mesh, width=1, shard_optimizer=True)
        for tx in (still, by_columns())
    ]
    state = trains[0].init(params())
    said = r"^`state` must be of a train step with this `tx`.*`opt_state\[0\]` split as"
    with pytest.raises(ValueError, match=said):
        trains[1].step(state, batches(1)[0])
    other = trains[1].init(state.params, opt_state=state.opt_state)
    trains[1].step(other, batches(1)[0])


def test_parameter_split_further_by_others_is_refused():
    """Groups split "a" along both axes, and "b" of the same shape along one."""
    mesh = jax.make_mesh(
        (2, 3),
        ("host", "fsdp"),
        axis_types=(jax.sharding.AxisType.Auto,) * 2,
        devices=jax.devices()[:6],
    )
    mixed = optax.GradientTransformation(
        lambda p: (), lambda g, s, p=None: ({"a": g["a"], "b": g["a"] + g["b"]}, s)
    )
    train = pj.make_train_step(
        lambda p, b: jnp.sum(p["a"] * p["b"]) * b.mean(),
        mixed,
        mesh=mesh,
        axis_name="host",
        shard_optimizer=True,
    )
    split = jax.device_put(jnp.ones((3, 4)), NamedSharding(mesh, P("fsdp")))
    with pytest.raises(ValueError, match=r"`update of params\['b'\] by arrays split"):
        train.init({"a": split, "b": jnp.ones((3, 4))})


MASK, ROWS = jnp.array([[1.0, 0.0, 1.0]]), jnp.arange(1.0, 6)[:, None]


@pytest.mark.one_python
def test_masks_scales_and_bits_are_close_to_unsharded():
    """Operands of length 1 along the split axis, and updates that read bits."""

    def update(g, state, params=None):
        del params
        negative = jax.lax.bitcast_convert_type(g["bias"], jnp.int32) < 0
        rounded = g["b"].astype(jnp.float8_e4m3fn).astype(jnp.float32)
        new = {
            "a": -0.1 * g["a"] * ROWS,
            "b": -0.1 * (rounded[..., None] * jnp.ones((1, 1, 2))).mean(-1),
            "bias": jnp.where(negative, g["bias"], 2 * g["bias"]),
            "out": -0.1 * jnp.square(g["out"]) * MASK,
            "none": g["none"],
        }
        return new, state

    tx = optax.GradientTransformation(lambda p: (), update)
    _, wanted = run(tx, 4, all_reduce=collectives.two_shot())
    _, found = run(tx, 4, shard_optimizer=True)
    assert_close(found.params, wanted.params)


@pytest.mark.one_python
def test_python_numbers_in_a_state_are_accepted():
    train, state = run(unlike()[0], 4, shard_optimizer=True, steps=2)
    assert int(jax.tree.leaves(state.opt_state)[8]) == 2
    given = jax.tree.map(lambda x: int(x) if x.dtype == int else x, state.opt_state)
    other = train.init(state.params, opt_state=given)
    assert_bits_equal(*(jax.device_get(x.opt_state) for x in (other, state)))


@pytest.mark.one_python
def test_checkpoint_keeps_the_pieces(tmp_path):
    tx, specs = unlike()
    _, state = run(tx, 4, shard_optimizer=True, steps=2)
    with checkpoint.manager(tmp_path / "run") as manager:
        checkpoint.save(manager, state)
        manager.wait_until_finished()
        for devices in (4, 2):
            other, _ = run(tx, devices, shard_optimizer=True, steps=0)
            like = other.abstract_state(params())
            found = checkpoint.restore(manager, other, like).state
            leaves = jax.tree.leaves(found.opt_state)
            assert [x.sharding.spec for x in leaves] == specs
            assert_bits_equal(*(jax.device_get(x.opt_state) for x in (found, state)))


@pytest.mark.full
@pytest.mark.parametrize("sharded", each([False, True], full=[False]))
def test_state_of_another_step_continues_with_init(sharded):
    """The remedy of errors: `train.init(state.params, opt_state=state.opt_state)`."""

    def made(hosts, width):
        devices = jax.devices()[: 2 * hosts]
        axes = ("host", "fsdp") if sharded else "data"
        options = {"hosts": hosts} if sharded else {}
        mesh = pj.data_mesh(devices=devices, axis_name=axes, **options)
        place = NamedSharding(mesh, P("fsdp") if sharded else P())
        train = pj.make_train_step(
            lambda p, b: jnp.mean((b @ p) ** 2),
            optax.adam(0.01),
            mesh=mesh,
            axis_name="host" if sharded else "data",
            width=width,
            shard_optimizer=True,
        )
        return train, jax.device_put(jnp.ones((8, 4)), place)

    batch = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    train, start = made(4, 2)
    state = train.init(start)
    for _ in range(2):
        state, _ = train.step(state, train.batch(batch))
    state, _ = train.drain(state)
    for hosts, width in ((4, 3), (2, 2)):  # another width, and half of the devices
        other, _ = made(hosts, width)
        found = other.init(state.params, opt_state=state.opt_state)
        parts = ((x.params, x.opt_state, x.gathered) for x in (found, state))
        assert_bits_equal(*map(jax.device_get, parts))
        form = other.abstract_state(start if hosts == 4 else found.params)
        assert found.params.sharding.is_equivalent_to(form.params.sharding, 2)
        other.step(found, other.batch(batch))


def test_schedule_of_algorithms_with_halves_is_followed():
    """Three steps send all bits, and two steps send 8 bits with error feedback."""
    feedback = codecs.error_feedback(codecs.int8())
    schedule = collectives.scheduled(
        [collectives.two_shot(), collectives.two_shot(feedback)], [3]
    )
    data = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)
    train = pj.make_train_step(
        lambda p, b: jnp.mean(b @ p),
        optax.sgd(0.1),
        mesh=pj.data_mesh(4),
        width=1,
        shard_optimizer=True,
        all_reduce=schedule,
    )
    state = train.init(jnp.zeros(64))
    assert all(k.startswith("phase 1 ") for k in state.in_flight.codec_states)
    off = []
    for step in range(1, 6):
        state, _ = train.step(state, data)
        off.append(np.abs(state.params + 0.1 * step * data.mean(0)).max())
    assert max(off[:3]) < 1e-6 < off[3]
    # A code is off by at most half of a step of the largest mean / 127, and what it
    # has left out is sent in the next step.
    assert max(off[3:]) < 0.1 * np.abs(data).max() / 127
    sent = train.transfers(state, data)
    assert [x.kind for x in sent][:2] == ["all-reduce", "all-to-all"]


def test_schedule_needs_halves_in_every_phase():
    schedule = collectives.scheduled([collectives.psum(), collectives.tree()], [3])
    with pytest.raises(ValueError, match=r"^`all_reduce` must have two halves"):
        pj.make_train_step(
            loss_fn,
            optax.sgd(0.1),
            mesh=pj.data_mesh(4),
            shard_optimizer=True,
            all_reduce=schedule,
        )
