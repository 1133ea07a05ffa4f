"""Tests the communication thread: the bits, failures, and what is overwritten."""

import copy
import gc
import itertools
import traceback

import jax
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import pipejax as pj
from pipejax import codecs, collectives

from ...helpers import (
    OPTIMIZERS,
    assert_bits_equal,
    batches,
    init_params,
    loss_fn,
    wrap_exchange,
)

FULL = pytest.mark.full
# On a second Python, test_mixed.py runs this executor.
pytestmark = pytest.mark.one_python


def make(executor, width=2, tx=None, devices=4, **options):
    return pj.make_train_step(
        loss_fn,
        tx or optax.adamw(1e-2),
        mesh=pj.data_mesh(devices),
        width=width,
        executor=executor,
        **options,
    )


def trained(train, steps=6):
    """Returns the infos of a run, its state with gradients in flight, and drained."""
    state, infos = train.init(init_params()), []
    for batch in batches(steps):
        state, info = train.step(state, batch)
        infos.append(jax.tree.map(np.asarray, info))
    in_flight = jax.tree.map(np.asarray, state)
    return infos, in_flight, jax.tree.map(np.asarray, train.drain(state)[0])


QUICK = {(1, "sgd"), (2, "momentum")}


@pytest.mark.parametrize(
    ("width", "optimizer"),
    [
        pytest.param(*case, marks=() if case in QUICK else FULL)
        for case in itertools.product((1, 2, 3, 4), OPTIMIZERS)
    ],
)
def test_host_executor_has_the_bits_of_the_fused(width, optimizer):
    options = {"width": width, "tx": OPTIMIZERS[optimizer], "warmup_steps": 1}
    fused = trained(make("fused", **options))
    assert_bits_equal(trained(make("host", **options)), fused)


def full_loss(params, batch, *, model_state, rng):
    noise = jax.random.normal(rng, batch["x"].shape)
    loss = loss_fn(params, batch | {"x": batch["x"] + 0.1 * noise})
    after = {"mean": 0.9 * model_state["mean"] + 0.1 * batch["x"].mean(0)}
    return loss, pj.Aux(metrics={"squared": loss**2}, model_state=after)


@pytest.mark.parametrize("donate", [pytest.param(False, marks=FULL), True])
def test_host_executor_has_the_same_bits_with_every_option(donate):
    def run(executor):
        train = pj.make_train_step(
            full_loss,
            optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
            mesh=pj.data_mesh(4),
            microbatches=2,
            executor=executor,
            donate=donate,
        )
        state = train.init(
            init_params(),
            model_state={"mean": np.zeros(5, np.float32)},
            rng=jax.random.key(0),
            batch=batches(1)[0],
        )
        for batch in batches(5):
            state, info = train.step(state, batch)
        state, _ = train.drain(state)
        state = state._replace(rng=jax.random.key_data(state.rng))
        return jax.tree.map(np.asarray, (state, info))

    assert_bits_equal(run("host"), run("fused"))


def test_states_may_change_between_executors():
    """A state holds unreduced gradients, so any executor can continue from it."""
    fused, host = make("fused", width=3), make("host", width=3)
    state = fused.init(init_params())
    for batch, train in zip(
        batches(6), [host, fused, fused, host, host, fused], strict=True
    ):
        state, _ = train.step(state, batch)
    assert_bits_equal(jax.tree.map(np.asarray, host.drain(state)[0]), trained(fused)[2])


def test_two_steps_may_start_from_one_state():
    train = make("host", width=3)
    state = train.init(init_params())
    first, second, third = batches(3)
    state, _ = train.step(state, first)
    train.step(state, third)  # starts another branch
    for batch in (second, third):
        state, _ = train.step(state, batch)
    state, _ = train.drain(state)
    assert_bits_equal(
        jax.tree.map(np.asarray, state), trained(make("fused", width=3), 3)[2]
    )


class UnpluggedError(Exception):
    """Stands for the error of a broken network."""


def break_reduction(train, failing):
    """Makes the reductions with the numbers in `failing` fail."""
    count = iter(range(100))

    def sometimes(exchange, *args):
        if next(count) in failing:
            raise UnpluggedError("no route to host")
        return exchange(*args)

    wrap_exchange(train.executor, sometimes)


@pytest.mark.parametrize("width", [1, pytest.param(2, marks=FULL), 3])
def test_failed_reduction_is_raised_at_the_next_step(width):
    """The error keeps its traceback, and the step can be taken again from the state."""
    train = make("host", width=width)
    break_reduction(train, {width})
    state = train.init(init_params())
    failures = 0
    for batch in batches(6):
        try:
            state, _ = train.step(state, batch)
        except UnpluggedError as error:
            failures += 1
            lines = "".join(traceback.format_exception(error))
            assert "no route to host" in lines
            assert "in sometimes" in lines
            state, _ = train.step(state, batch)
    assert failures == 1
    assert_bits_equal(
        jax.tree.map(np.asarray, train.drain(state)[0]),
        trained(make("fused", width))[2],
    )


@pytest.mark.parametrize("failing", [pytest.param(0, marks=FULL), 1])
def test_failed_reduction_is_raised_in_the_drain(failing):
    """The state can be drained again, although a drain overwrites a donated state."""
    train = make("host", width=3, donate=True)
    state = train.init(init_params())
    for batch in batches(2):
        state, _ = train.step(state, batch)
    train.join()
    break_reduction(train, {failing})
    train.executor._begun.clear()
    with pytest.raises(UnpluggedError):
        train.drain(state)
    assert_bits_equal(
        jax.tree.map(np.asarray, train.drain(state)[0]),
        trained(make("fused", width=3), 2)[2],
    )


def test_gradients_are_summed_by_copy_on_other_devices():
    """Gradients are copied to one CPU device, as from a GPU, summed and copied back.

    The gradients of all devices of this process are added up before the copy.
    """
    train = make("host", tx=optax.sgd(0.1))
    other = Mesh(np.array(jax.devices()[7:]), ("data",))
    train.executor.__dict__["reduction_mesh"] = other  # cached_property stores it here
    got, want = trained(train), trained(make("fused", tx=optax.sgd(0.1)))
    assert_bits_equal(got, want)  # one host sums in rank order either way
    state = train.init(init_params())
    for batch in batches(2):
        state, _ = train.step(state, batch)
    assert state.params["out"].sharding.device_set == set(jax.devices()[:4])


@pytest.mark.parametrize(
    "all_reduce", [collectives.psum(), collectives.ring(codecs.int8(8))]
)
def test_float64_of_the_caller_applies_on_the_thread(all_reduce):
    def trained(executor):
        train = pj.make_train_step(
            lambda params, batch: (params * batch).mean(),
            optax.sgd(1.0),
            mesh=pj.data_mesh(2),
            executor=executor,
            all_reduce=all_reduce,
        )
        state = train.init(np.zeros(()))
        state, _ = train.step(state, np.full(8, 1 / 3))
        return train.drain(state)[0].params

    with jax.enable_x64(True):
        assert_bits_equal(trained("host"), trained("fused"))


def test_float64_of_the_caller_applies_to_a_sharded_optimizer():
    """Also to the parameters that are gathered at the end of a drain."""

    def trained(executor):
        train = pj.make_train_step(
            lambda params, batch: (params * batch.mean()).sum(),
            optax.sgd(1.0),
            mesh=pj.data_mesh(2),
            executor=executor,
            shard_optimizer=True,
        )
        state, _ = train.step(train.init(np.zeros(4)), np.full(8, 1 / 3))
        state, _ = train.drain(state)
        return jax.tree.map(np.asarray, (state.params, state.gathered))

    with jax.enable_x64(True):
        found = trained("host")
        assert found[1].dtype == np.float64
        assert_bits_equal(found, trained("fused"))


def test_earlier_phases_keep_no_exchanges():
    schedule = collectives.scheduled([collectives.psum(), collectives.ring()], [2])
    train, data = make("host", all_reduce=schedule), batches(3)
    state = train.init(init_params())
    for batch in data:
        state, _ = train.step(state, batch)
    counts = [len(executor._begun) for executor in train._executors]
    assert counts == [0, 1]
    drained = jax.tree.map(np.asarray, train.drain(state)[0])
    assert_bits_equal(drained, trained(make("fused", all_reduce=schedule), 3)[2])


@pytest.mark.parametrize("executor", ["host", "fused"])
def test_copy_of_a_step_trains_like_the_step(executor):
    """The copy of a step that has reductions under way has none of them."""
    train, data = make(executor), batches(4)
    state = train.init(init_params())
    for batch in data[:2]:
        state, _ = train.step(state, batch)
    other = copy.deepcopy(train)
    ends = []
    for each in (other, train):
        after, _ = each.step(state, data[2])
        ends.append(jax.tree.map(np.asarray, each.drain(after)[0]))
    assert_bits_equal(*ends)


def test_host_executor_inside_jit_is_refused():
    train = make("host")
    state = train.init(init_params())
    message = r"`executor` must be 'fused' for a step inside jit or scan: .* got 'host'"
    with pytest.raises(ValueError, match=message):
        jax.jit(train.step)(state, batches(1)[0])
    with pytest.raises(ValueError, match=message):
        jax.jit(train.drain)(state)


def test_compute_program_has_no_collective():
    train = make("host")
    text = train.lower(train.init(init_params()), batches(1)[0]).as_text()
    assert "stablehlo.dot_general" in text
    assert "all_reduce" not in text
    assert train.compiler_options == {}


def test_join_waits_and_changes_nothing():
    train = make("host", width=3)
    state = train.init(init_params())
    for batch in batches(3):
        state, _ = train.step(state, batch)
    train.join()
    assert len(train.executor._begun) == 2
    assert all(each.result.done() for each in train.executor._begun)
    assert_bits_equal(
        jax.tree.map(np.asarray, train.drain(state)[0]),
        trained(make("fused", width=3), 3)[2],
    )


@pytest.mark.parametrize(
    "codec",
    [None, pytest.param(codecs.error_feedback(codecs.int4(8)), marks=FULL)],
)
def test_past_steps_keep_no_arrays_alive(codec):
    """12 steps leave as many arrays as 6, although each sum waits for another."""
    train = make("host", width=4, all_reduce=collectives.two_shot(codec))
    state, counts = train.init(init_params()), []
    for _ in range(2):
        for batch in batches(6):
            state, info = train.step(state, batch)
        train.join()
        jax.block_until_ready((state, info))
        train._lead._results.clear()  # losses of steps that may be under way
        gc.collect()
        counts.append(len(jax.live_arrays()))
    assert counts[0] == counts[1]
