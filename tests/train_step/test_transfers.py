"""Tests the list of all collectives that a step sends."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import pipejax as pj
from pipejax import collectives
from pipejax.collectives import Transfer
from pipejax.train_step._transfers import _own_transfers

from ..core.executors.test_own_collectives import X, on_hosts
from ..helpers import batches, init_params, loss_fn

DEVICES = 4
(BATCH,) = batches(1)


def sums(*sizes):
    """Returns an all-reduce for each number of bytes."""
    return tuple(Transfer("all-reduce", DEVICES, size) for size in sizes)


# The gradients have 7, 5 x 7 and 7 x 3 elements of 4 bytes, in the order of their
# names. Then comes the loss.
EXCHANGE = sums(28, 140, 84, 4)


def transfers(loss=loss_fn, tx=None, **settings):
    """Returns the transfers of a step, from shapes alone."""
    tx, mesh = tx or optax.sgd(0.1), pj.data_mesh(DEVICES)
    train = pj.make_train_step(loss, tx, mesh=mesh, **settings)
    state = jax.eval_shape(train.init, init_params())
    return train.transfers(state, jax.eval_shape(lambda: BATCH))


@pytest.mark.parametrize("width", [1, 3])
def test_transfers_do_not_depend_on_the_width(width):
    assert transfers(width=width) == EXCHANGE


def test_loss_stays_float32():
    assert transfers(reduce_dtype=jnp.bfloat16) == sums(14, 70, 42, 4)


def test_transfers_accept_arrays_and_shapes():
    train = pj.make_train_step(loss_fn, optax.sgd(0.1), mesh=pj.data_mesh(DEVICES))
    assert train.transfers(train.init(init_params()), BATCH) == EXCHANGE


def test_transfers_belong_to_the_last_phase_of_a_schedule():
    """A ring sends every piece around once to sum it, and once to hand it out."""
    schedule = collectives.scheduled([collectives.psum(), collectives.ring()], [5])
    found = transfers(all_reduce=schedule)
    assert [x.kind for x in found] == ["collective-permute"] * 2 * (DEVICES - 1)


@pytest.mark.parametrize("width", [1, 2])
def test_transfers_of_a_sharded_model_and_optimizer_are_listed(width):
    """The loss has a sum inside the group; the exchange has two halves between them."""
    mesh = pj.data_mesh(4, axis_name=("host", "fsdp"), hosts=2)
    train = pj.make_train_step(
        lambda w, batch: jnp.mean((batch @ w) ** 2),
        optax.adam(0.1),
        mesh=mesh,
        axis_name="host",
        width=width,
        shard_optimizer=True,
        all_reduce=collectives.two_shot(),
        weight_prediction=False,
    )
    columns = jax.sharding.NamedSharding(mesh, jax.P(None, "fsdp"))
    params = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=columns)
    found = train.transfers(
        train.abstract_state(params), jax.ShapeDtypeStruct((8, 8), jnp.float32)
    )
    *inner, scatter, loss, finite, gather = found
    assert inner == [Transfer("all-reduce", 2, 4)]
    # A device has 16 of the 32 elements in its group, and gathers halves of them.
    assert scatter == Transfer("all-to-all", 2, 64)
    assert loss == Transfer("all-reduce", 2, 4)
    # Whether all elements are finite, and the sum of their squares.
    assert finite == Transfer("all-reduce", 4, 8)
    assert gather == Transfer("all-gather", 2, 32)


def centred(params, batch):
    """Returns a loss that exchanges a mean of five features."""
    mean = lax.pmean(batch["x"].mean(0), "data")
    return loss_fn(params, batch | {"x": batch["x"] - mean[None]})


@pytest.mark.parametrize("microbatches", [1, 2])
def test_collectives_of_the_loss_come_first_with_their_count(microbatches):
    found = transfers(centred, microbatches=microbatches)
    assert found == sums(20) * microbatches + EXCHANGE


def averaging(updates, state, params=None):
    """Makes an update that exchanges an array of seven elements."""
    del params
    return updates | {"bias": lax.pmean(updates["bias"], "data")}, state


@pytest.mark.parametrize(
    ("settings", "updates"),
    [
        ({"width": 1}, 1),
        ({"width": 2}, 2),
        ({"width": 2, "weight_prediction": False}, 1),
    ],
)
def test_collectives_of_the_optimizer_count_in_predictions_too(settings, updates):
    tx = optax.GradientTransformation(lambda params: optax.EmptyState(), averaging)
    tx = optax.chain(tx, optax.sgd(0.1))
    assert transfers(tx=tx, **settings) == sums(28) * updates + EXCHANGE


def test_transfers_in_a_loop_count_for_every_iteration():
    """Five floats are 20 bytes; two floats in each of three iterations are 8 bytes."""

    def local(x):
        def exchange(_, pair):
            return lax.pmax(pair, "device") + 1

        total = lax.psum(x, "host")
        return lax.fori_loop(0, 3, exchange, total[:2]).sum() + total

    found = _own_transfers(on_hosts(local), X)
    small = Transfer("all-reduce", 2, 8)
    assert sorted(found) == [small, small, small, Transfer("all-reduce", 2, 20)]


def test_program_without_collectives_is_not_compiled():
    """The argument cannot be compiled, so compiling it would raise an error."""
    assert _own_transfers(lambda x: x + 1, X) == ()
