"""Tests which checkpoints a train step can continue: by loss function and kind."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax import checkpoint

from ..grid import each, grid
from ..helpers import assert_bits_equal

BATCH = np.zeros((4, 4), np.float32)


def mean(params, batch):
    return jnp.mean((params[None, :] - batch) ** 2)


def loss(aux):
    def loss_fn(params, batch):
        return mean(params, batch), aux

    return loss_fn


OLD = loss(pj.Aux(weight=jnp.float32(512)))
METRIC = loss(pj.Aux(metrics={"tokens": jnp.float32(512)}))
OTHERS = {
    "['loss', \"metrics['tokens']\"]": METRIC,
    "['loss']": mean,
    "['loss', 'weight', \"metrics['a']\"]": loss(
        pj.Aux(metrics={"a": jnp.float32(1)}, weight=jnp.float32(512))
    ),
}


def made(loss_fn, devices=2, **options):
    """Returns a train step, and what its `init` takes."""
    options = {"mesh": pj.data_mesh(devices)} | options
    train = pj.make_train_step(loss_fn, optax.adam(0.1), **options)
    return train, jnp.ones(4)


def started(train, params, steps=1):
    state = train.init(params, batch=BATCH)
    for _ in range(steps):
        state, _ = train.step(state, BATCH)
    return state


def restored(folder, state, train, params, batch=BATCH):
    """Saves a state, and restores it for another train step."""
    with checkpoint.manager(folder) as manager:
        checkpoint.save(manager, state)
        like = train.abstract_state(params, batch=batch)
        return checkpoint.restore(manager, train, like).state


@pytest.mark.parametrize("name", OTHERS)
def test_loss_with_other_passengers_is_refused(tmp_path, name):
    state = started(*made(OLD))
    rule = re.escape(f"was in flight: ['loss', 'weight']; got {name}.")
    rule = rule.replace("was", "is")
    with pytest.raises(ValueError, match=rf"`like` must be of the loss .* {rule} If"):
        restored(tmp_path, state, *made(OTHERS[name]))


def test_renamed_metric_is_refused_and_the_remedies_work(tmp_path):
    train, params = made(METRIC)
    other, _ = made(loss(pj.Aux(metrics={"words": jnp.float32(512)})))
    state = started(train, params, 2)
    with pytest.raises(ValueError, match=r"\['tokens'\].*; got .*\['words'\]") as error:
        restored(tmp_path / "refused", state, other, params)
    drained, _ = train.drain(state)
    # A drained state is restored for any loss function.
    first = restored(tmp_path / "drained", drained, other, params)
    # The old loss function restores it, and drains it.
    again = restored(tmp_path / "again", state, train, params)
    drain, remedy = re.findall(r"`((?:state, _|train\.init\(s).*?)`", str(error.value))[
        -2:
    ]
    scope = {"train": train, "state": again, "batch": BATCH}
    exec(drain, scope)
    second = eval(remedy, scope | {"train": other})
    for found in (first, second):
        assert found.in_flight.pending[0].passengers.names[1] == "metrics['words']"
        assert_bits_equal(
            *jax.device_get([(x.params, x.opt_state) for x in (found, drained)])
        )
        state, info = other.step(found, BATCH)
        assert not bool(info.applied)
        assert float(other.drain(state)[1][0].metrics["words"]) == 512


def test_test_metrics_without_a_batch_are_refused(tmp_path):
    train, params = made(METRIC)
    with pytest.raises(ValueError, match=r"give `batch=` to `train\.init`"):
        restored(tmp_path, started(train, params), train, params, batch=None)


KINDS = {
    "plain": lambda: made(METRIC, 4),
    "fewer devices": lambda: made(METRIC, 2),
    "sharded optimizer": lambda: made(METRIC, 4, shard_optimizer=True),
    "sharded model": lambda: sharded(),
    "other dtype": lambda: made(METRIC, 4, reduce_dtype=jnp.bfloat16),
}


def sharded():
    mesh = pj.data_mesh(8, axis_name=("host", "fsdp"), hosts=4)
    train, params = made(METRIC, mesh=mesh, axis_name="host")
    return train, jax.device_put(params, NamedSharding(mesh, P("fsdp")))


@pytest.mark.parametrize("kind", each(KINDS, full=["plain", "sharded model"]))
def test_empty_queue_is_made_anew_with_the_form_of_init(tmp_path, kind):
    """It has the form that `init` gives it, whatever was in flight before a drain."""
    options = {"shard_optimizer": True} if kind == "sharded optimizer" else {}
    train, params = made(OLD, 4, **options)
    state, _ = train.drain(started(train, params, 3))
    other, given = KINDS[kind]()
    found = restored(tmp_path, state, other, given)
    wanted = other.init(given, batch=BATCH)
    assert_bits_equal(found.in_flight, wanted.in_flight)
    assert jax.tree.structure(found.in_flight) == jax.tree.structure(wanted.in_flight)
    for leaf, form in zip(
        *map(jax.tree.leaves, (found.in_flight, wanted.in_flight)), strict=True
    ):
        assert leaf.sharding.is_equivalent_to(form.sharding, leaf.ndim)
    assert_bits_equal(*jax.device_get((found.params, state.params)))
    other.step(found, BATCH)


def test_other_metrics_are_accepted_at_width_1(tmp_path):
    state = started(*made(OLD, width=1))
    found = restored(tmp_path, state, *made(METRIC, width=1))
    assert_bits_equal(*jax.device_get((found.params, state.params)))


@grid(1, devices=[4, 2], was=[False, True])
def test_changed_shard_optimizer_is_refused(tmp_path, was, devices):
    state = started(*made(METRIC, 4, shard_optimizer=was))
    rule = (
        rf"`train` must have shard_optimizer={was}, as the train step that saved the .*"
        rf"; got shard_optimizer={not was}\. To .* Then drain it with .* of the new tr"
    )
    with pytest.raises(ValueError, match=rule):
        restored(tmp_path, state, *made(METRIC, devices, shard_optimizer=not was))


@pytest.mark.parametrize("codec", [None, pj.codecs.int4(8)], ids=["whole", "int4"])
@pytest.mark.parametrize(("was", "now"), [(4, 1), (1, 4)])
def test_sharded_optimizer_continues_on_one_device_and_back(tmp_path, was, now, codec):
    options = {"shard_optimizer": True, "gather_codec": codec, "width": 3}
    train, params = made(METRIC, was, **options)
    state = started(train, params, 4)
    other, _ = made(METRIC, now, **options)
    found = restored(tmp_path, state, other, params)
    state, _ = train.drain(state)
    chex.assert_trees_all_close(
        (found.params, found.opt_state), (state.params, state.opt_state)
    )
    assert_bits_equal(*jax.device_get((found.gathered, found.params)))
    params, opt_state = jax.device_get((state.params, state.opt_state))
    wanted = other.init(params, opt_state=opt_state, batch=BATCH)
    for _ in range(3):
        (found, _), (wanted, _) = (other.step(x, BATCH) for x in (found, wanted))
    chex.assert_trees_all_close(found.params, wanted.params)
