"""Tests the rule that model state follows, against the same recursion by hand."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax import checkpoint
from pipejax._core.step._model_state import averaged

from ...grid import grid
from ...train_step.refusals import refused

FULL = pytest.mark.full

STEPS, SIZE = 7, 4
# Rounding: values of at most 4, two sums for each of 7 steps and at most 3 changes.
CLOSE = {"rtol": 0, "atol": 4 * 2 * STEPS * 3 * 2.0**-24}


def data(devices, steps=STEPS):
    rng = np.random.default_rng(3)
    return rng.normal(size=(steps, devices, 2, SIZE)).astype(np.float32)


def start():
    return {
        "average": np.zeros(SIZE, np.float32),  # moves by a part
        "last": np.float32(0),  # is replaced
        "spectrum": np.zeros(SIZE, np.complex64),  # is replaced, complex
        "wave": np.complex64(1),  # a complex scalar
        "seen": np.int32(0),  # a counter
        "table": np.full(3, -np.inf, np.float32),  # stays as it is
    }


def after(x, s, xp):
    """Returns the model state after a batch, with the functions of `xp`."""
    return {
        "average": 0.9 * s["average"] + 0.1 * x.mean(0),
        "last": x.mean(),
        "spectrum": xp.fft.fft(x.mean(0)),
        "wave": 0.5 * s["wave"] + 1j * x.mean(),
        "seen": s["seen"] + 1,
        "table": s["table"],
    }


def loss(params, batch, *, model_state):
    new = after(batch, model_state, jnp)
    return jnp.mean(params["w"] * batch.mean(0)), pj.Aux(model_state=new)


MOVING = ("average", "last", "spectrum", "wave")


def by_hand(shares, width, microbatches=1):
    """Returns the model state after each step, and after the drain."""
    s, queue, found = start(), [], []

    def apply(changes):
        mean = {k: sum(d[k] for d in changes) / len(changes) for k in MOVING}
        return {k: s[k] + mean.get(k, 0) for k in s}

    for xs in shares:
        each = []
        for i, x in enumerate(xs):
            ahead = {k: s[k] + sum(d[i][k] for d in queue) for k in MOVING}
            new = ahead | {k: s[k] for k in s.keys() - {*MOVING}}
            for part in np.split(x, microbatches):
                new = after(part, new, np)
            each.append({k: new[k] - ahead[k] for k in MOVING})
        queue.append(each)
        if len(queue) == width:
            s = apply(queue.pop(0))
        s = s | {"seen": s["seen"] + microbatches}
        found.append(s)
    while queue:
        s = apply(queue.pop(0))
    return [*found, s]


def assert_close(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == start()[name].dtype
        np.testing.assert_allclose(found[name], value, err_msg=name, **CLOSE)


# Tests share train steps, and with them traced programs.
@functools.cache
def make(loss=loss, *, grouped=False, **settings):
    """Makes a train step of two devices, or of two groups of two devices."""
    mesh = pj.data_mesh(2)
    if grouped:
        mesh = pj.data_mesh(4, axis_name=("host", "fsdp"), hosts=2)
        settings["axis_name"] = "host"
    return pj.make_train_step(loss, optax.adam(0.1), mesh=mesh, **settings)


def begin(train, table=None, **given):
    """Returns a first state; the arrays of a group are split inside it."""
    params, model_state = {"w": jnp.ones(SIZE)}, start()
    model_state |= {} if table is None else {"table": table}
    if "fsdp" in train.mesh.axis_names:
        split = NamedSharding(train.mesh, P("fsdp"))
        params = jax.device_put(params, split)
        for name in ("average", "spectrum"):
            model_state[name] = jax.device_put(model_state[name], split)
    batch = jax.ShapeDtypeStruct((4, SIZE), jnp.float32)
    return train.init(params, model_state=model_state, **({"batch": batch} | given))


def states(train, shares, state):
    """Returns the model state after each step, and after the drain."""
    found = []
    for xs in shares:
        state, _ = train.step(state, xs.reshape(-1, SIZE))
        found.append(state.model_state)
    return [*found, train.drain(state)[0].model_state]


@pytest.mark.parametrize(
    ("width", "settings"),
    [
        (1, {}),
        pytest.param(2, {}, marks=FULL),
        (3, {"executor": "host"}),
        (2, {"weight_prediction": False}),
        pytest.param(3, {"weight_prediction": False}, marks=FULL),
        pytest.param(3, {"weight_prediction": False, "executor": "host"}, marks=FULL),
        (2, {"shard_optimizer": True}),
        pytest.param(
            3, {"shard_optimizer": True, "weight_prediction": False}, marks=FULL
        ),
        (2, {"microbatches": 2}),
        pytest.param(1, {"microbatches": 2}, marks=FULL),
        pytest.param(3, {"grouped": True}, marks=FULL),
        pytest.param(2, {"grouped": True, "weight_prediction": False}, marks=FULL),
        (2, {"grouped": True, "shard_optimizer": True}),
        pytest.param(1, {"grouped": True, "shard_optimizer": True}, marks=FULL),
    ],
    ids=str,
)
def test_model_state_equals_the_recursion_by_hand(width, settings):
    train, shares = make(width=width, **settings), data(2)
    found = states(train, shares, begin(train))
    wanted = by_hand(shares, width, settings.get("microbatches", 1))
    for got, hand in zip(found, wanted, strict=True):
        assert_close(got, hand)
    if "grouped" in settings:
        assert found[-1]["spectrum"].sharding.spec == P("fsdp")


@grid(1, width=[2, 3], predicts=[True, False])
def test_replaced_value_follows_the_synchronous_twin(width, predicts):
    """It arrives `width - 1` steps late, and neither oscillates nor grows."""
    shares = data(2, 9)
    train = make(width=width, weight_prediction=predicts)
    found = states(train, shares, begin(train))
    late = width - 1
    for step in range(late, 9):
        want = shares[step - late].mean()
        np.testing.assert_allclose(found[step]["last"], want, **CLOSE)
    np.testing.assert_allclose(found[-1]["last"], shares[-1].mean(), **CLOSE)


def test_warm_up_starts_synchronously():
    train, shares = make(width=2, warmup_steps=3), data(2)
    found = states(train, shares, begin(train))
    for got, hand in zip(found[:3], by_hand(shares[:3], 1), strict=False):
        assert_close(got, hand)
    assert_close(found[3], found[2] | {"seen": np.int32(4)})  # the pipeline fills
    assert_close(found[-1], by_hand(shares, 1)[-1])


def test_skipped_change_is_not_predicted():
    """A device expects no change of a message of its own that is not finite."""
    for skips in (True, False):
        train = make(width=2, weight_prediction=False, skip_nonfinite=skips)
        state, shares = begin(train), data(2)
        shares[2] = np.inf  # on all devices
        found = states(train, shares, state)
        last = np.array([s["last"] for s in found])
        if not skips:
            assert not np.isfinite(last[3:]).any()
            continue
        want = [shares[n].mean() for n in (0, 1)]
        np.testing.assert_allclose(last[1:3], want, **CLOSE)
        np.testing.assert_allclose(last[3], last[2])  # was skipped
        np.testing.assert_allclose(last[4], shares[3].mean(), **CLOSE)


class TestWhatIsSent:
    """Only what the loss function changes travels and takes room in the queue."""

    def test_unchanged_leaves_and_counters_are_not_in_the_message(self):
        for settings in ({}, {"grouped": True}, {"shard_optimizer": True}):
            train = make(width=3, **settings)
            state = begin(train)
            state, _ = train.step(state, data(2)[0].reshape(-1, SIZE))
            for message in state.in_flight.pending:
                sent = {k for k, v in message.changes.items() if v is not None}
                assert sent == {*MOVING}
            assert state.in_flight.pending[0].changes["wave"].dtype == jnp.float32

    def test_unchanged_leaves_cost_no_bytes(self):
        def frozen(params, batch, *, model_state):
            value = jnp.mean(batch @ model_state["base"]) * params["w"].mean()
            return value, pj.Aux(model_state=model_state)

        def constant(params, batch):
            return jnp.mean(batch @ jnp.ones((SIZE, 99))) * params["w"].mean()

        sent = []
        for fn, given in (
            (frozen, {"model_state": {"base": jnp.ones((SIZE, 99))}}),
            (constant, {}),
        ):
            for width in (1, 2):
                train = make(fn, width=width)
                batch = np.ones((4, SIZE), np.float32)
                given = given | {"batch": batch}
                state = train.init({"w": jnp.ones(SIZE)}, **given)
                sent.append(train.transfers(state, batch))
        assert sent[:2] == sent[2:]

    def test_unchanged_leaves_are_no_results(self):
        """No program copies them, neither those that are averaged nor integers."""
        model_state = {"base": jnp.ones((SIZE, 99)), "codes": jnp.ones(999, jnp.int8)}

        def frozen(params, batch, *, model_state):
            scale = model_state["base"].mean() + model_state["codes"].mean()
            new = model_state | {"seen": model_state["seen"] + 1}
            return scale * batch.mean() * params["w"].mean(), pj.Aux(model_state=new)

        for executor, width, settings in (
            ("fused", 1, {}),
            ("fused", 2, {"microbatches": 2}),
            ("fused", 2, {"grouped": True}),
            ("host", 2, {}),
            ("fused", 2, {"donate": True}),
            ("host", 2, {"donate": True}),
        ):
            train = make(frozen, width=width, executor=executor, **settings)
            params, given = {"w": jnp.ones(SIZE)}, model_state | {"seen": np.int32(0)}
            if settings.get("grouped"):
                split = NamedSharding(train.mesh, P("fsdp"))
                params = jax.device_put(params, split)
                given |= {"base": jax.device_put(given["base"], split)}
            state = train.init(params, model_state=given, batch=ONES)
            memory = train.lower(state, ONES).compile().memory_analysis()
            # Results that lie where arguments lay are no copies.
            copied = memory.output_size_in_bytes - memory.alias_size_in_bytes
            assert copied < 999
            for _ in range(2):
                before, (state, _) = state.model_state, train.step(state, ONES)
                for name in model_state:
                    kept = state.model_state[name] is before[name]
                    assert kept == (not settings.get("donate"))
            before, (state, _) = state.model_state, train.drain(state)
            assert int(state.model_state["seen"]) == 2 * settings.get("microbatches", 1)
            for name, value in model_state.items():
                np.testing.assert_array_equal(state.model_state[name], value)

    def test_init_without_a_batch_is_refused_where_a_leaf_would_travel(self):
        train, table = make(width=2), np.float32([1, 2, 3])
        state = begin(train, table, batch=None)
        with refused(
            r"`batch` must be given to `train.init` where `loss_fn` returns model state"
            r" unchanged, .* got a state with room for changes of"
            r" `model_state\['table'\]`\. Call `train.init\(params, ..., batch=batch\)`"
        ):
            train.step(state, data(2)[0].reshape(-1, SIZE))
        train = make(width=1)
        train.step(begin(train, table, batch=None), data(2)[0].reshape(-1, SIZE))

    def test_state_of_a_loss_with_fewer_changes_is_refused(self):
        def still(params, batch, *, model_state):
            return loss(params, batch, model_state=model_state)[0], pj.Aux(
                model_state=model_state
            )

        state = begin(make(still))
        batch = data(2)[0].reshape(-1, SIZE)
        with refused(
            r"got one of a loss that returns `model_state\['average'\]` unchanged\."
            r" Drain it .* `train.init\(state.params, .* batch=batch\)`"
        ):
            make().step(state, batch)
        make().drain(state)  # nothing in flight belongs to another leaf

    def test_complex_numbers_travel_in_the_reduce_dtype(self):
        train = make(reduce_dtype=jnp.bfloat16)
        state = begin(train)
        changes = state.in_flight.pending[0].changes
        assert changes["spectrum"].dtype == jnp.bfloat16
        assert changes["spectrum"].shape == (2 * SIZE, 2)
        shares = data(2)
        found, wanted = states(train, shares, state)[-1], by_hand(shares, 2)[-1]
        # bfloat16 has a mantissa of 8 bits; sums are of two terms of at most 4.
        np.testing.assert_allclose(found["wave"], wanted["wave"], atol=4 * 4 * 2**-8)


SMALL = {"scale": jnp.ones(3, jnp.float8_e4m3fn), "seen": jnp.int32(0)}
ONES = np.ones((4, SIZE), np.float32)


def small(params, batch, *, model_state):
    scale = model_state["scale"].astype(jnp.float32)
    new = model_state | {"seen": model_state["seen"] + 1}
    return params["w"].mean() * batch.mean() * scale.mean(), pj.Aux(model_state=new)


class TestFloatingDtypesBelow16Bits:
    """They may be frozen, and cannot be averaged."""

    def test_unchanged_float8_leaf_keeps_its_dtype(self):
        train = make(small)
        state = train.init({"w": jnp.ones(SIZE)}, model_state=SMALL)
        for _ in range(3):
            state, _ = train.step(state, ONES)
        state, _ = train.drain(state)
        assert state.model_state["scale"].dtype == jnp.float8_e4m3fn
        assert int(state.model_state["seen"]) == 3

    def test_changed_float8_leaf_is_refused(self):
        def changing(params, batch, *, model_state):
            value, aux = small(params, batch, model_state=model_state)
            half = aux.model_state["scale"] * jnp.float8_e4m3fn(0.5)
            return value, pj.Aux(model_state=aux.model_state | {"scale": half})

        train = make(changing)
        state = train.init({"w": jnp.ones(SIZE)}, model_state=SMALL)
        with refused(
            r"must not change model state of a floating dtype below 16 bits, .* got"
            r" `model_state\['scale'\]` of dtype float8_e4m3fn. Keep it in float32"
        ):
            train.step(state, ONES)

    def test_floating_leaves_of_at_least_16_bits_are_averaged(self):
        yes = (jnp.float16, jnp.bfloat16, jnp.float32, jnp.complex64)
        no = (jnp.float8_e4m3fn, jnp.int32, jnp.bool_)
        assert all(averaged(jnp.zeros(1, dtype)) for dtype in yes)
        assert not any(averaged(jnp.zeros(1, dtype)) for dtype in no)
        assert not averaged(jax.random.key(0))


@pytest.mark.parametrize("devices", [2, 1])
def test_checkpoint_restores_changes_in_flight(tmp_path, devices):
    """On other devices, the changes in flight are applied first."""
    train, shares = make(width=3, weight_prediction=False), data(2)
    state = begin(train)
    for xs in shares:
        state, _ = train.step(state, xs.reshape(-1, SIZE))
    other = pj.make_train_step(
        loss,
        optax.adam(0.1),
        mesh=pj.data_mesh(devices),
        width=3,
        weight_prediction=False,
    )
    with checkpoint.manager(tmp_path) as manager:
        checkpoint.save(manager, state)
        restored = checkpoint.restore(manager, other, begin(other))
    assert restored.drained == (devices == 1)
    drained = other.drain(restored.state)[0].model_state
    assert_close(drained, by_hand(shares, 3)[-1])


def test_model_state_keeps_the_static_objects_of_init():
    """The structure of the state is that which `init` was given."""

    @jax.tree_util.register_pytree_node_class
    class Norm:
        def __init__(self, mean, act):
            self.mean, self.act = mean, act

        def tree_flatten(self):
            return (self.mean,), self.act

        @classmethod
        def tree_unflatten(cls, act, leaves):
            return cls(*leaves, act)

    def fn(params, batch, *, model_state):
        mean = 0.5 * model_state.mean + batch.mean()
        return jnp.mean(params["w"]), pj.Aux(model_state=Norm(mean, lambda x: x))

    train = make(fn)
    act = jnp.tanh
    state = train.init({"w": jnp.ones(SIZE)}, model_state=Norm(jnp.float32(0), act))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            state, _ = train.step(state, np.ones((4, SIZE), np.float32))
    assert state.model_state.act is act
    assert float(train.drain(state)[0].model_state.mean) == 1.75
