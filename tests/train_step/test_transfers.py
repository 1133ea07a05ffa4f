"""Tests the list of all collectives that a step sends."""

import collections

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import pipejax as pj
from pipejax import codecs, collectives
from pipejax.collectives import Transfer
from pipejax.train_step._transfers import _own_transfers

from .. import groups
from ..core.executors.test_own_collectives import X, on_hosts
from ..grid import grid
from ..groups import mesh_of, placed
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
    # The residuals of the first phase need no agreement any more.
    fed_back = collectives.two_shot(codecs.error_feedback(codecs.int8(8)))
    schedule = collectives.scheduled([fed_back, collectives.psum()], [5])
    assert transfers(all_reduce=schedule) == EXCHANGE


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


def local_step(loss=loss_fn, **settings):
    """Returns local steps of one device for each group."""
    mesh, settings = pj.data_mesh(DEVICES), {"sync_every": 5} | settings
    return pj.make_local_step(loss, optax.sgd(0.1), mesh=mesh, **settings)


# Of 7, 5 x 7 and 7 x 3 elements, a chunk has a third, rounded up.
CHUNK = 4 * (3 + 12 + 7)


@pytest.mark.parametrize("executor", ["fused", "host"])
def test_report_of_a_round_travels_with_the_last_chunk(executor):
    train = local_step(overlap_steps=3, executor=executor)
    state = train.abstract_state(init_params())
    chunks = [train.transfers(state, BATCH, chunk=number) for number in range(3)]
    assert chunks == [sums(CHUNK), sums(CHUNK), sums(CHUNK, 4)]
    # Of the five steps, two have no chunk.
    assert train.transfers(train.init(init_params()), BATCH) == sum(chunks, ())


def test_round_without_overlap_sends_all_parameters_at_its_end():
    train = local_step(overlap_steps=0)
    state = train.abstract_state(init_params())
    whole = sums(4 * (7 + 5 * 7 + 7 * 3), 4)
    assert train.transfers(state, BATCH) == whole
    assert train.transfers(state, BATCH, chunk=0) == whole


def test_metrics_weight_and_model_state_travel_with_the_last_chunk():
    def full(params, batch, *, model_state):
        loss, seen = loss_fn(params, batch), model_state["seen"] + 1
        aux = pj.Aux({"loss": loss}, {"seen": seen}, weight=jnp.float32(2))
        return loss, aux

    train = local_step(full, sync_every=2)
    model_state = {"seen": jnp.zeros(6)}
    args = {"model_state": model_state, "batch": BATCH}
    state = train.abstract_state(init_params(), **args)
    first, last = (train.transfers(state, BATCH, chunk=number) for number in (0, 1))
    # Loss, metric and weight are three numbers.
    assert sum(x.bytes for x in last) - sum(x.bytes for x in first) == 4 * (6 + 3)


@pytest.mark.parametrize(("overlap", "chunks"), [(2, 2), (0, 1)])
def test_collectives_of_the_loss_count_in_every_local_step(overlap, chunks):
    train = local_step(centred, overlap_steps=overlap)
    state, data = train.abstract_state(init_params()), jax.eval_shape(lambda: BATCH)
    found = train.transfers(state, data)
    assert found.count(Transfer("all-reduce", DEVICES, 20)) == 5
    last = train.transfers(state, data, chunk=chunks - 1)
    assert last[0] == Transfer("all-reduce", DEVICES, 20)
    assert found[-len(last) :] == last


@pytest.mark.parametrize("chunk", [-1, 3, 1.0, True])
def test_chunk_of_no_such_number_is_refused(chunk):
    train = local_step(overlap_steps=3)
    message = r"`chunk` must be an integer from 0 to 2, .* got (-1|3|1\.0|True)\."
    with pytest.raises(ValueError, match=message):
        train.transfers(train.abstract_state(init_params()), BATCH, chunk=chunk)


def test_transfers_of_a_state_of_other_rounds_are_refused():
    state = local_step(overlap_steps=3).abstract_state(init_params())
    with pytest.raises(ValueError, match="`state` must be one of 2 chunks"):
        local_step(overlap_steps=2).transfers(state, BATCH)


CODED = collectives.two_shot(codecs.error_feedback(codecs.int8(8)))


@grid(1, split=[None, "copies", "fsdp"], all_reduce=["psum", "int8"], overlap=[1, 3])
def test_transfers_of_a_chunk_are_in_its_compiled_program(split, all_reduce, overlap):
    """The four groups have one device each, or divide a chunk between two."""
    mesh = pj.data_mesh(4, axis_name="host") if split is None else mesh_of(4, split)
    given = groups.params() if split is None else placed(mesh, split)
    train = groups.local_step(
        mesh,
        sync_every=3,
        overlap_steps=overlap,
        all_reduce={"psum": collectives.psum(), "int8": CODED}[all_reduce],
    )
    (batch,) = groups.batches(1)
    batch = train.batch(batch, axis_name=mesh.axis_names)
    state, _ = train.step(train.init(given), batch)
    compiled = pj.overlap.inspect(train, state, batch).collectives
    declared = train.transfers(state, batch, chunk=0)
    # Two devices take part in a collective inside a group.
    assert {x.devices for x in declared} <= {2, 4}
    assert total((x.kind, x.bytes) for x in declared if x.devices == 4) == total(
        (x.kind, x.bytes * x.times) for x in compiled if x.axes == ("host",)
    )


def test_transfers_at_once_are_in_the_compiled_program():
    """PowerSGD keeps a state, and int8 a residual."""
    train = pj.make_train_step(
        loss_fn,
        optax.sgd(0.1),
        mesh=pj.data_mesh(DEVICES),
        at_once=codecs.power_sgd(1, jax.random.key(0)),
        all_reduce=CODED,
    )
    state, batch = train.init(init_params()), batches(1)[0]
    compiled = pj.overlap.inspect(train, state, batch).collectives
    declared = train.transfers(state, batch)
    assert total((x.kind, x.bytes) for x in declared) == total(
        (x.kind, x.bytes * x.times) for x in compiled
    )


def total(pairs):
    """Returns the bytes of each kind of collective."""
    found = collections.Counter()
    for kind, size in pairs:
        found[kind] += size
    return found
