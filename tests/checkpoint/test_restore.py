"""Tests that `restore` returns every bit, returns a drained state, or refuses."""

import json
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import pipejax as pj
from pipejax import checkpoint
from pipejax._core.message import count as count_in_flight
from pipejax.checkpoint._meta import digest

from ..grid import grid
from ..helpers import (
    assert_bits_equal,
    batches,
    init_params,
    loss_fn,
    with_trainable,
)
from .helpers import ADAMW, feedback, host, init, new_train_step, run, train_step
from .runs import ALL_REDUCES
from .runs import params as linear_params
from .runs import train_step as linear_step

FULL = pytest.mark.full


@grid(
    1,
    width=[1, 2, 3],
    options=[
        {},
        {"warmup_steps": 6},
        {"weight_prediction": "own"},
    ],
)
def test_restored_run_continues_bit_for_bit(manager, width, options):
    data, train = batches(12), train_step(width=width, **options)
    expected = host(train.drain(run(train, init(train), data))[0])
    state = run(train, init(train), data[:5])
    checkpoint.save(manager, state, {"next_index": 5})
    state = run(train, state, data[5:8])  # donates the state while it is being written
    manager.wait_until_finished()
    fresh = new_train_step(width=width, **options)
    like = jax.eval_shape(lambda: init(fresh))
    # Another process would read in this way.
    with checkpoint.manager(manager.directory, read_only=True) as reader:
        restored = checkpoint.restore(reader, fresh, like)
    assert restored.extras == {"next_index": 5}
    assert not restored.drained
    assert_bits_equal(
        host(fresh.drain(run(fresh, restored.state, data[5:]))[0]), expected
    )


@pytest.mark.parametrize(
    ("before", "now", "rule", "width"),
    [
        (4, 2, "linearized", 2),
        (2, 8, "own", 3),
        pytest.param(8, 1, "linearized", 2, marks=FULL),
        pytest.param(4, 2, "linearized", 3, marks=FULL),
        pytest.param(2, 8, "own", 2, marks=FULL),
        pytest.param(8, 1, "linearized", 3, marks=FULL),
    ],
)
def test_restore_on_other_devices_drains_first(
    manager, caplog, before, now, rule, width
):
    options = {"weight_prediction": rule}
    data, train = batches(6), train_step(before, width, **options)
    state = run(train, init(train), data)
    checkpoint.save(manager, state)
    manager.wait_until_finished()
    expected = host(train.drain(state)[0])
    other = train_step(now, width, **options)
    restored = checkpoint.restore(manager, other, init(other))
    assert restored.drained
    assert "gradients in flight are applied first" in caplog.text
    assert count_in_flight(restored.state.in_flight) == 0
    # The mean over p devices is summed in another order, with p terms and p roundings.
    for got, want in zip(
        jax.tree.leaves(restored.state.params),
        jax.tree.leaves(expected.params),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    assert len(set(pj.replica_digest(restored.state).values())) == 1
    state, info = other.step(restored.state, data[0])
    assert not bool(info.applied), "the pipeline fills anew"


def test_checkpoint_holds_a_message_of_every_host(manager):
    axes, params = ("host", "device"), init_params()

    def make():
        mesh = pj.data_mesh(4, axis_name=axes, hosts=2)
        return pj.make_train_step(loss_fn, ADAMW, mesh=mesh, axis_name=axes, width=3)

    train, fresh, data = make(), make(), batches(8)
    state = run(train, train.init(params), data[:4])
    checkpoint.save(manager, state)
    manager.wait_until_finished()
    expected = host(train.drain(run(train, state, data[4:]))[0])
    restored = checkpoint.restore(manager, fresh, fresh.init(params))
    assert not restored.drained
    assert_bits_equal(
        host(fresh.drain(run(fresh, restored.state, data[4:]))[0]), expected
    )
    leaves = json.loads((manager.directory / "4/meta/metadata").read_text())["leaves"]
    (rows, columns), _ = leaves["in_flight.pending[0].gradients['hidden']"]
    assert (rows / 2, columns) == params["hidden"].shape


@pytest.mark.full
@pytest.mark.parametrize(("before", "now"), [((4, 2), (4,)), ((4,), (4, 2))])
def test_run_goes_on_where_other_devices_form_hosts(manager, before, now):
    """Residuals stay where they are, and what is in flight stays in flight."""
    first, second = (
        linear_step(ALL_REDUCES["two_shot"], *each, width=2) for each in (before, now)
    )
    data = batches(3, size=24)
    state = run(first, first.init(linear_params()), data)
    checkpoint.save(manager, state)
    manager.wait_until_finished()
    restored = checkpoint.restore(manager, second, second.init(linear_params()))
    assert not restored.drained
    found = restored.state
    assert count_in_flight(found.in_flight) == 1
    kept = [x.in_flight.codec_states for x in (found, state)]
    assert jax.tree.leaves(kept[0])
    assert_bits_equal(*map(jax.device_get, kept))
    total = [
        jax.tree.map(
            lambda leaf, like: (
                np.asarray(leaf, np.float32).reshape(-1, *like.shape).mean(axis=0)
            ),
            x.in_flight.pending[0].gradients,
            linear_params(),
        )
        for x in (found, state)
    ]
    chex.assert_trees_all_close(*total, rtol=1e-2, atol=1e-6)  # some are bfloat16
    second.step(found, data[0])


def test_empty_pipeline_is_not_drained_on_other_devices(manager):
    train, other = train_step(4), train_step(2)
    state, _ = train.drain(run(train, init(train), batches(3)))
    checkpoint.save(manager, state)
    manager.wait_until_finished()
    restored = checkpoint.restore(manager, other, init(other))
    assert (restored.drained, restored.infos) == (False, ())
    assert_bits_equal(host(restored.state.params), host(state.params))


def test_synchronous_checkpoint_needs_no_drain(manager):
    train, other = train_step(4, 1), train_step(2, 1)
    state = run(train, init(train), batches(3))
    checkpoint.save(manager, state)
    manager.wait_until_finished()
    restored = checkpoint.restore(manager, other, init(other))
    assert not restored.drained
    assert_bits_equal(host(restored.state).params, host(state).params)


def test_other_width_is_refused_and_the_remedy_works(manager):
    train, other = train_step(width=2), train_step(width=3)
    checkpoint.save(manager, run(train, init(train), batches(2)))
    manager.wait_until_finished()
    with pytest.raises(
        ValueError, match=r"`train` must have width=2.*got width=3"
    ) as refused:
        checkpoint.restore(manager, other, init(other))
    remedy = re.search(r"`(train.init\(.*?\))`", str(refused.value))[1]
    state = checkpoint.restore(manager, train, init(train)).state
    state, _ = train.drain(state)
    again = eval(remedy, {"train": other, "state": state, "batch": batches(1)[0]})
    run(other, again, batches(2))


def shaped(shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


OUT = r"params\['out'\]: saved float32\[7,3\], wanted "
OTHERS = {
    "shape": (lambda like: with_out(like, shaped((7, 4))), OUT + r"float32\[7,4\]"),
    "dtype": (
        lambda like: with_out(like, shaped((7, 3), "bfloat16")),
        OUT + r"bfloat16\[7,3\]",
    ),
    "one less": (
        lambda like: with_trainable(like, params={"bias": like.params["bias"]}),
        r"params\['hidden'\]: saved float32\[5,7\], wanted none",
    ),
    "one more": (
        lambda like: with_trainable(like, params=like.params | {"a.b": shaped((2,))}),
        r"params\['a\.b'\]: saved none, wanted float32\[2\]",
    ),
    "structure": (
        lambda like: with_trainable(like, params=list(like.params.values())),
        r"params\[0\]: saved none, wanted float32\[7\]",
    ),
    "optimizer": (
        lambda like: with_trainable(like, opt_state=()),
        r"opt_state\[0\]\.count: saved int32\[\], wanted none",
    ),
    "model state": (
        lambda like: like._replace(model_state=shaped((), "bool")),
        r"model_state: saved none, wanted bool\[\]",
    ),
    "kind of key": (
        lambda like: like._replace(rng=jax.random.key(0, impl="rbg")),
        r"rng: saved key<fry>\[\], wanted key<rbg>\[\]",
    ),
    "raw key": (
        lambda like: like._replace(rng=jax.random.PRNGKey(0)),
        r"rng: saved key<fry>\[\], wanted uint32\[2\]",
    ),
}


def with_out(like, leaf):
    return with_trainable(like, params=like.params | {"out": leaf})


def test_template_of_another_form_is_refused_with_its_leaf_named(manager):
    train = train_step()
    checkpoint.save(manager, init(train))
    like = jax.eval_shape(lambda: init(train))
    for change, words in OTHERS.values():
        rule = (
            rf"`like` must have the form of .* leaves differ, the first is {words}\. "
        )
        with pytest.raises(ValueError, match=rule):
            checkpoint.restore(manager, train, change(like))


def test_state_without_a_counter_is_refused_in_a_warm_up(manager):
    checkpoint.save(manager, init(train_step()))
    train = train_step(warmup_steps=1)
    with pytest.raises(ValueError, match=r"calls: saved none, wanted int32\[\]"):
        checkpoint.restore(manager, train, init(train))


def test_keys_of_equal_form_and_other_impl_are_refused(manager):
    """Keys of `rbg` and `unsafe_rbg` are both stored as four integers."""
    train = train_step()
    state = train.init(init_params(), rng=jax.random.key(0, impl="rbg"))
    checkpoint.save(manager, state)
    other = train.init(init_params(), rng=jax.random.key(0, impl="unsafe_rbg"))
    with pytest.raises(ValueError, match=r"rng: saved key<rbg>.*, wanted key<urbg>"):
        checkpoint.restore(manager, train, other)


def test_donated_template_is_accepted(manager):
    train = train_step()
    like = init(train)
    checkpoint.save(manager, like)
    run(train, like, batches(1))
    assert int(checkpoint.restore(manager, train, like).state.step) == 0


def test_template_other_than_a_state_is_refused(manager):
    train = train_step()
    checkpoint.save(manager, init(train))
    with pytest.raises(
        ValueError, match=r"`like` must be a pj.PipelineState .*got dict"
    ):
        checkpoint.restore(manager, train, init_params())


def test_checkpoint_of_an_earlier_version_is_refused(manager):
    train = train_step()
    checkpoint.save(manager, init(train))
    manager.wait_until_finished()
    (meta,) = manager.directory.glob("*/meta/metadata")
    past = {**json.loads(meta.read_text()), "version": 1}
    del past["digest"]
    meta.write_text(json.dumps({**past, "digest": digest(past)}))
    with pytest.raises(ValueError, match=r"that this version of pipejax writes"):
        checkpoint.restore(manager, train, init(train))


@pytest.mark.parametrize("damaged", ['"verrion": 2', '"version": 3'])
def test_damaged_version_is_damage(manager, damaged):
    train, (batch,) = train_step(), batches(1)
    state = init(train)
    checkpoint.save(manager, state)
    state = run(train, state, [batch])
    checkpoint.save(manager, state)
    manager.wait_until_finished()
    meta = manager.directory / "1" / "meta" / "metadata"
    found = meta.read_text()
    assert found.count('"version": 2') == 1
    meta.write_text(found.replace('"version": 2', damaged))
    assert int(checkpoint.restore(manager, train, init(train)).state.step) == 0


@pytest.mark.parametrize("local", [False, True])
def test_state_of_another_optimizer_is_refused(manager, local):
    """Their arrays have the same names and shapes."""

    def made(tx):
        settings = {"mesh": pj.data_mesh(2)}
        if local:
            return pj.make_local_step(loss_fn, tx, **settings)
        return pj.make_train_step(loss_fn, tx, **settings)

    old, new = made(optax.adam(0.1)), made(optax.adabelief(0.1))
    checkpoint.save(manager, old.init(init_params()))
    message = "that the checkpoint has a state of: .*ScaleByAdamState.* got .*Belief"
    with pytest.raises(ValueError, match=message):
        checkpoint.restore(manager, new, new.init(init_params()))


def test_restored_state_is_not_replaced_in_part(manager):
    train = new_train_step(shard_optimizer=True)
    checkpoint.save(manager, init(train))
    other, (batch,) = new_train_step(shard_optimizer=True), batches(1)
    state = checkpoint.restore(manager, other, init(other)).state
    zeros = jax.tree.map(jnp.zeros_like, state.params)
    edited = state._replace(trainable=state.trainable._replace(params=zeros))
    with pytest.raises(ValueError, match=r"`state\.params` must not be replaced by ha"):
        other.step(edited, batch)
    other.step(state, batch)


def test_checkpoint_of_another_program_is_refused(tmp_path):
    with ocp.CheckpointManager(tmp_path) as theirs:
        theirs.save(0, args=ocp.args.StandardSave(init_params()))
        theirs.wait_until_finished()
    train = train_step()
    with (
        checkpoint.manager(tmp_path) as manager,
        pytest.raises(ValueError, match=r"unless another program has written"),
    ):
        checkpoint.restore(manager, train, init(train))


def test_folder_without_a_checkpoint_is_refused(manager):
    train = train_step()
    with pytest.raises(FileNotFoundError, match="`manager` must have a checkpoint"):
        checkpoint.restore(manager, train, init(train))


def test_missing_step_is_refused_with_the_steps_listed(manager):
    train = train_step()
    checkpoint.save(manager, run(train, init(train), batches(2)))
    like = jax.eval_shape(lambda: init(train))
    rule = (
        r"`step` must be the step of a checkpoint in .*, which has steps \[2\]; got 1\."
    )
    with pytest.raises(FileNotFoundError, match=rule):
        checkpoint.restore(manager, train, like, step=1)
    restored = checkpoint.restore(manager, train, like, step=np.int64(2))
    assert int(restored.state.step) == 2


@pytest.mark.parametrize("step", [2.0, "2", True, -1, np.float32(2), [2]])
def test_step_must_be_an_integer_of_at_least_0(manager, step):
    train = train_step()
    rule = r"`step` must be an integer of at least 0, or None, got .*\. None restores"
    with pytest.raises(ValueError, match=rule):
        checkpoint.restore(manager, train, init(train), step)


@pytest.mark.parametrize("step", [2, np.int32(2), np.array(2), jax.numpy.int32(2)])
def test_step_may_be_any_type_of_integer(manager, step):
    train = train_step()
    with pytest.raises(FileNotFoundError, match="`manager` must have a checkpoint"):
        checkpoint.restore(manager, train, init(train), step)


def residuals(state):
    return jax.tree.map(np.array, jax.tree.leaves(state.in_flight.codec_states))


@pytest.mark.parametrize(
    "width", [pytest.param(1, marks=FULL), 2, pytest.param(3, marks=FULL)]
)
def test_codec_states_are_restored_and_the_run_continues(manager, width):
    """The step of a schedule is restored too: the run continues unchanged."""
    data, train = batches(9), feedback(4, width)
    expected = host(train.drain(run(train, init(train), data))[0])
    state = run(train, init(train), data[:5])
    assert any(x.any() for x in residuals(state))
    checkpoint.save(manager, state)
    manager.wait_until_finished()
    fresh = feedback(4, width, new_train_step)
    restored = checkpoint.restore(manager, fresh, jax.eval_shape(lambda: init(fresh)))
    assert int(restored.state.calls) == 5
    assert_bits_equal(
        host(fresh.drain(run(fresh, restored.state, data[5:]))[0]), expected
    )


def test_test_another_codec_is_refused(manager):
    train, other = feedback(4), train_step(4)
    checkpoint.save(manager, run(train, init(train), batches(2)))
    manager.wait_until_finished()
    with pytest.raises(ValueError, match=r"of 26 leaves differ"):
        checkpoint.restore(manager, other, init(other))


def test_restore_inside_a_longer_warm_up_drains_first(manager):
    """The next step has no delay, and would leave what is in flight for later."""
    short, long = (train_step(warmup_steps=steps) for steps in (1, 9))
    state = run(short, init(short), batches(3))
    checkpoint.save(manager, state)
    restored = checkpoint.restore(manager, long, init(long))
    assert restored.drained
    assert [bool(info.applied) for info in restored.infos] == [True]
    wanted, _ = short.drain(run(short, init(short), batches(3)))
    assert_bits_equal(host(restored.state).params, host(wanted).params)
    again = checkpoint.restore(manager, short, init(short))
    assert not again.drained
