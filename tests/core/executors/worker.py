"""
Runs one process of a group: `python -m tests.core.executors.worker RANK ...`.

The process reads tasks from its standard input, each a line of JSON
`[name, *arguments]`. It answers each task with a line of JSON: `{"result": ...}`, or
`{"error": ...}` with a traceback. All other output of a task goes to standard error.
"""

import functools
import itertools
import json
import os
import pathlib
import signal
import sys
import threading
import time
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax import checkpoint, codecs, collectives

from ...helpers import batches, init_params, loss_fn, wrap_exchange
from . import local_steps, mixed, own_collectives, pieces, sharded
from . import stateful as stateful_model


def main(rank, processes, port, devices):
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # also the output of C++
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, rank)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            answer = {"result": TASKS[name](*arguments)}
        except Exception:
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")


def run(train, steps, state=None, *, drained=True, moved=False):
    """Returns the final state. Each process passes its share of every batch.

    If `moved`, every second batch comes as a global array that is not split.
    """
    state = train.init(init_params()) if state is None else state
    rank, processes = jax.process_index(), jax.process_count()
    for number, batch in enumerate(batches(steps)):
        mine = jax.tree.map(lambda x: np.split(x, processes)[rank], batch)
        given = train.batch(mine)
        if moved and number % 2:
            train.join()  # JAX compares what processes place
            whole = NamedSharding(train.mesh, P())
            given = jax.tree.map(lambda x, to=whole: jax.device_put(x, to), batch)
        state, _ = train.step(state, given)
    return train.drain(state)[0] if drained else state


def in_rank_order(processes):
    """Returns an exact all-reduce: Gloo's order of adding more than two is its own."""
    return collectives.psum() if processes == 2 else collectives.two_shot()


def exact(*widths):
    """Returns the executor's name, and the bits of the parameters at each width."""
    out = {}
    for width in map(int, widths):
        train = pj.make_train_step(
            loss_fn,
            optax.adamw(1e-2),
            mesh=pj.data_mesh(),
            width=width,
            all_reduce=in_rank_order(jax.process_count()),
        )
        out[str(width)] = bits(run(train, 6).params)
    executor = train.executor
    return {"executor": executor.name, "reason": executor.reason, "params": out}


def fed():
    """Makes a global batch of this process's part, and gives a step local arrays."""
    train = pj.make_train_step(loss_fn, optax.sgd(0.1), mesh=pj.data_mesh())
    rank, (whole,) = jax.process_index(), batches(1)
    mine = jax.tree.map(lambda x: np.split(x, jax.process_count())[rank], whole)
    both = train.batch(mine)
    state = train.init(init_params())
    refusals = []
    for wrong in (mine, jax.tree.map(jnp.asarray, mine)):
        try:
            train.step(state, wrong)
        except ValueError as error:
            refusals.append(str(error))
    own = [np.asarray(x.addressable_data(0)) for x in jax.tree.leaves(both)]
    return {
        "shapes": [x.shape for x in jax.tree.leaves(both)],
        "own": all(map(np.array_equal, own, jax.tree.leaves(mine))),
        "refusals": refusals,
        "fewest": train.fewest_batches(7 - rank),
    }


WITH_CODECS = ("two_shot", "ring", "low rank", "float16")


@functools.cache
def apart(executor, local):
    """Returns the errors of calls that the other process does not make."""
    rank, (batch,) = jax.process_index(), batches(1)
    part = jax.tree.map(lambda x: np.split(x, 2)[rank], batch)
    fewer = jax.tree.map(lambda x: x[: 8 - 4 * rank], part)
    args, settings = (loss_fn, optax.sgd(0.1)), {"executor": executor}
    if local:
        settings |= {"sync_every": 2, "overlap_steps": 2}
        train = pj.make_local_step(*args, mesh=pj.data_mesh(), **settings)
    else:
        train = pj.make_train_step(*args, mesh=pj.data_mesh(), width=2, **settings)

    def errors(calls):
        state, found = train.init(init_params()), []
        for call in calls:
            try:
                state, _ = call(state)
            except ValueError as error:
                found.append(str(error))
        train.join()
        return found

    def step(state):
        return train.step(state, train.batch(part))

    def shorter(state):
        return train.step(state, train.batch(fewer))

    found = {"batch": errors([step, shorter, train.drain])}
    if executor == "host" and not local:  # others may have other collectives
        orders = [step, step, train.drain], [step, train.drain, step]
        found["order"] = errors(orders[rank])
    return found, errors([step, step, train.drain])


def coded_step(name, devices):
    """Returns a train step of width 2 that compresses, most with a codec state."""
    key, reduce_dtype = jax.random.key(0), None
    if name == "two_shot":
        all_reduce = collectives.two_shot(codecs.error_feedback(codecs.int4(8)))
    elif name == "ring":
        all_reduce = collectives.ring(codecs.stochastic(codecs.int8(8), key))
    elif name == "float16":
        # Two summands have one order.
        all_reduce = collectives.psum() if devices == 2 else collectives.tree()
        reduce_dtype = jnp.float16
    else:
        whole = collectives.psum if devices == 2 else collectives.tree
        all_reduce = whole(codecs.error_feedback(codecs.power_sgd(1, key)))
    return pj.make_train_step(
        loss_fn,
        optax.adamw(1e-2),
        mesh=pj.data_mesh(devices),
        reduce_dtype=reduce_dtype,
        all_reduce=all_reduce,
    )


def coded():
    """Returns the bits of the parameters with each of the codecs."""
    return {
        name: bits(run(coded_step(name, jax.device_count()), 6).params)
        for name in WITH_CODECS
    }


def frozen_step():
    """Returns a train step of width 2 that trains one layer of two."""
    tx = optax.partition(
        {"train": optax.adam(1e-2), "freeze": optax.set_to_zero()},
        {"hidden": "freeze", "bias": "freeze", "out": "train"},
    )
    return pj.make_train_step(loss_fn, tx, mesh=pj.data_mesh(2))


def partly_delayed_step(delayed="hidden"):
    """Returns a train step of width 2 that delays the gradient of one layer."""
    return pj.make_train_step(
        loss_fn,
        optax.adam(1e-2),
        mesh=pj.data_mesh(2),
        delayed=lambda params: {name: name == delayed for name in params},
    )


def partly_delayed():
    """Also returns what a choice that differs between the processes is told."""
    differing = partly_delayed_step("hidden" if jax.process_index() else "out")
    try:
        differing.init(init_params())
    except ValueError as error:
        said = str(error)
    return [said, *sent_and_trained(partly_delayed_step())]


def frozen():
    return sent_and_trained(frozen_step())


def sent_and_trained(train):
    """Returns the executor, the bytes of an exchange, and the bits of parameters."""
    (batch,) = batches(1)
    # A model is often made on one device of each process.
    state = train.init(jax.device_put(init_params(), jax.local_devices()[0]))
    sent = sum(x.bytes for x in train.transfers(state, train.batch(batch)))
    return [train.executor.name, sent, bits(run(train, 4, state, moved=True).params)]


def fed_back(devices):
    """Returns a train step whose state has residuals and gradients in flight."""
    return coded_step("two_shot", devices)


def saved(folder):
    """Takes four steps, then saves a checkpoint."""
    train = fed_back(jax.device_count())
    state = run(train, 4, drained=False)
    train.join()
    with checkpoint.manager(folder) as manager:
        checkpoint.save(manager, state)


def restored(folder):
    """Restores a checkpoint, takes four steps, and returns the parameters' bits."""
    train = fed_back(jax.device_count())
    with checkpoint.manager(folder) as manager:
        state = checkpoint.restore(manager, train, train.init(init_params())).state
    return bits(run(train, 4, state).params)


def saved_and_restored(folder):
    """Checks that every kind of leaf, and a run past its warm-up, are restored."""
    from ...checkpoint import zoo  # Flax takes a second

    folder, train = pathlib.Path(folder), zoo.train_step(jax.device_count())
    state = zoo.filled_at_random(zoo.init(train))
    with checkpoint.manager(folder / "zoo") as manager:
        checkpoint.save(manager, state, {"position": 1})
        like = jax.eval_shape(lambda: zoo.init(train))
        restored = checkpoint.restore(manager, train, like)
    zoo.assert_same(restored.state, state)

    train = pj.make_train_step(
        loss_fn, optax.adamw(1e-2), mesh=pj.data_mesh(), warmup_steps=2
    )
    state = run(train, 3, drained=False)
    train.join()
    with checkpoint.manager(folder / "warm") as manager:
        checkpoint.save(manager, state)
        again = checkpoint.restore(manager, train, train.init(init_params())).state
    zoo.assert_same(again._replace(calls=None), state._replace(calls=None))
    return {"extras": restored.extras, "calls": int(again.calls)}


def extras_of_each(folder):
    """Returns what each process restores of its own bytes, of other lengths."""
    rank, train = jax.process_index(), fed_back(jax.device_count())
    state = train.init(init_params())
    train.join()
    own = {"shard": rank, "at": bytes(range(rank + 1))}
    with checkpoint.manager(folder) as manager:
        extras = {"calls": 1, "data": [checkpoint.PerProcess(own)]}
        checkpoint.save(manager, state, extras)
        restored = checkpoint.restore(manager, train, state).extras
    found = restored["data"][0].value
    return [restored["calls"], found["shard"], found["at"].hex()]


def restored_beside_a_deletion(folder):
    """Returns the step that is restored if step 2 is deleted while it is read."""
    from pipejax.checkpoint import _read

    def read(path):
        if path.name == "2" and jax.process_index() == 0 and path.exists():
            path.rmtree()
        return whole(path)

    whole, _read.read = _read.read, read
    train = fed_back(jax.device_count())
    state = train.init(init_params())
    try:
        with checkpoint.manager(folder, keep=None) as manager:
            for step in range(3):
                checkpoint.save(manager, state, {"step": step})
                state = run(train, 1, state, drained=False)
                train.join()
        with checkpoint.manager(folder, read_only=True) as manager:
            found = checkpoint.restore(manager, train, jax.eval_shape(lambda: state))
    finally:
        _read.read = whole
    return found.extras["step"]


def restored_from_damage(folder):
    """Returns the step that is restored if step 2 is damaged for one process only."""
    from pipejax.checkpoint import _fault, _read

    def arrays(path, shapes):
        if path.name == "2" and jax.process_index() == 1:
            raise _fault.DamagedError("params['w'] is lost")
        return whole(path, shapes)

    whole, _read._arrays = _read._arrays, arrays
    train = fed_back(jax.device_count())
    state = train.init(init_params())
    try:
        with checkpoint.manager(folder, keep=None) as manager:
            for step in range(3):
                checkpoint.save(manager, state, {"step": step})
                state = run(train, 1, state, drained=False)
                train.join()
            found = checkpoint.restore(manager, train, jax.eval_shape(lambda: state))
            again = checkpoint.restore(manager, train, jax.eval_shape(lambda: state))
    finally:
        _read._arrays = whole
    assert int(found.state.step) == int(again.state.step) == found.extras["step"]
    return int(found.state.step)


def opened(folder):
    """Returns what opening a folder for saving says, and then for reading."""
    said = opened_for_saving(folder)
    checkpoint.manager(folder, read_only=True).close()
    return said


def opened_for_saving(folder):
    try:
        checkpoint.manager(folder).close()
    except ValueError as error:
        return str(error)
    return "opened"


def opened_apart(folder):
    """Returns what opening another folder on each process says."""
    from pipejax.checkpoint import _shared_folder

    longest, _shared_folder._UNSEEN = _shared_folder._UNSEEN, 0.5
    try:
        return opened_for_saving(pathlib.Path(folder) / str(jax.process_index()))
    finally:
        _shared_folder._UNSEEN = longest


def saved_in_turn(folder):
    """Saves in two managers; process 1 lags behind. Returns the steps of one."""
    train = fed_back(jax.device_count())
    state = train.init(init_params())
    with (
        checkpoint.manager(pathlib.Path(folder) / "last", keep=None) as last,
        checkpoint.manager(pathlib.Path(folder) / "best", keep=None) as best,
    ):
        for _ in range(3):
            time.sleep(0.3 * jax.process_index())
            checkpoint.save(last, state)
            checkpoint.save(best, state)
            state = run(train, 1, state, drained=False)
            train.join()
        last.wait_until_finished()
        return [*map(int, last.all_steps())]


def refused(folder):
    """Returns the errors of saves that would not hold for all, then of a good one."""
    rank, said = jax.process_index(), []
    train = fed_back(jax.device_count())
    state = train.init(init_params())
    train.join()
    alone = state._replace(skipped=jax.numpy.int32(rank))
    with checkpoint.manager(folder) as manager:
        for each, extras in ((state, {"position": rank}), (alone, {}), (state, {})):
            try:
                checkpoint.save(manager, each, extras)
                said.append("saved")
            except ValueError as error:
                said.append(str(error))
    return said


def bits(params):
    return {
        jax.tree_util.keystr(path): np.asarray(x).tobytes().hex()
        for path, x in jax.tree_util.tree_leaves_with_path(params)
    }


def overlapping(width):
    """Returns whether compute and reduction overlapped, each waiting for the other.

    Compute t waits for the start of the reduction of message t-1, which waits for the
    start of compute t. If they ran one after the other, the first one would wait in
    vain.
    """
    width, steps, patience, met = int(width), 6, 60, []
    computing, reducing = (
        [threading.Event() for _ in range(steps + 1)] for _ in range(2)
    )
    computes, reductions = itertools.count(1), itertools.count(2 - width)

    def wait(x):
        number = next(computes)
        computing[number].set()
        if number > 1:
            met.append(reducing[number - 1].wait(patience))
        return x

    def waiting_loss(params, batch):
        loss = loss_fn(params, batch)
        return loss + 0 * jax.pure_callback(wait, loss, jax.lax.stop_gradient(loss))

    train = pj.make_train_step(
        waiting_loss,
        optax.sgd(0.1),
        mesh=pj.data_mesh(),
        width=width,
        executor="host",
    )

    def waiting(exchange, *args):
        number = next(reductions)  # numbers up to 0 are the zeros of the start
        if 0 < number < steps:
            reducing[number].set()
            met.append(computing[number + 1].wait(patience))
        return exchange(*args)

    wrap_exchange(train.executor, waiting)
    run(train, steps)
    return met


def noisy_loss(params, batch, *, rng):
    x = batch["x"] + jax.random.normal(rng, batch["x"].shape)
    return loss_fn(params, {**batch, "x": x})


def keyed(kind):
    """Trains with a typed or a raw key, and passes the result to `init` again."""
    train = pj.make_train_step(noisy_loss, optax.sgd(0.1), mesh=pj.data_mesh())
    key = {"typed": jax.random.key, "raw": jax.random.PRNGKey}[kind](0)
    state = run(train, 3, train.init(init_params(), rng=key), drained=False)
    again = train.init(state.params, rng=state.rng)  # on all processes already
    return {"params": bits(run(train, 3, state).params), "again": bits(again.params)}


def stateful():
    """Trains a model with static objects, complex model state and several keys."""
    train, state = stateful_model.make(pj.data_mesh())
    state = run(train, 5, state)
    sent = state.in_flight.pending[0].changes
    return {
        "sent": sorted(name for name, x in sent.items() if x is not None),
        "params": bits(state.params.params),
        "model_state": bits(state.model_state),
    }


def differing(name):
    """Returns the error of `init` for arguments that differ between processes."""
    rank, given = jax.process_index(), {"params": init_params()}
    if name == "rng":
        given["rng"] = jax.random.key(rank)
    elif name == "structure":
        given["params"] |= {"more": np.ones(2, np.float32)} if rank else {}
    else:
        given["params"][name] = given["params"][name] + np.float32(rank)
    loss = noisy_loss if name == "rng" else loss_fn
    train = pj.make_train_step(loss, optax.sgd(0.1), mesh=pj.data_mesh())
    try:
        train.init(given.pop("params"), **given)
    except ValueError as error:
        return str(error)


def unlike(name):
    """Returns the error of a train step that process 1 makes or feeds differently."""
    rank, tx = jax.process_index(), optax.sgd(0.1)
    own = {
        "width": {"width": 3},
        "all_reduce": {"all_reduce": collectives.two_shot(codecs.int8())},
        "warmup_steps": {"warmup_steps": 2},
        "weight_prediction": {"weight_prediction": False},
        "reduce_dtype": {"reduce_dtype": "bfloat16"},
        "executor": {"executor": "fused"},
    }.get(name, {})
    if rank and name == "tx":
        tx = optax.adam(0.1)
    train = pj.make_train_step(
        loss_fn, tx, mesh=pj.data_mesh(), **(own if rank else {})
    )
    if name == "sync_every":
        mesh, every = pj.data_mesh(), 2 + rank
        train = pj.make_local_step(loss_fn, tx, mesh=mesh, sync_every=every)
    (batch,) = batches(1)
    try:
        state = train.init(init_params())
        mine = {k: x[: 4 + rank * (name == "batch")] for k, x in batch.items()}
        train.step(state, train.batch(mine))
    except ValueError as error:
        return str(error)


def distilled(params, batch, *, shared):
    teacher = jnp.tanh(batch["x"] @ shared["teacher"])
    return shared["scale"] * loss_fn(params, {**batch, "y": teacher})


def shares(executor):
    """Trains with a global array and a number, then gives one that differs."""
    train = pj.make_train_step(
        distilled, optax.sgd(0.1), mesh=pj.data_mesh(), executor=executor
    )
    rank, processes = jax.process_index(), jax.process_count()
    state, teacher = train.init(init_params()), np.ones((5, 3), np.float32)
    for step, batch in enumerate(batches(4)):
        mine = jax.tree.map(lambda x: np.split(x, processes)[rank], batch)
        shared = {"teacher": teacher, "scale": 0.5**step}
        state, _ = train.step(state, train.batch(mine), shared)
        # A global array of all processes, as later steps are given.
        teacher = state.params["hidden"][:, :3]
    found = bits(train.drain(state)[0].params)
    arrays = {"teacher": np.ones((5, 3), np.float32), "scale": np.float32(1)}
    with jax.transfer_guard("disallow"):  # arrays are placed, which is asked for
        train.step(state, train.batch(mine), arrays)
    other = pj.make_train_step(distilled, optax.sgd(0.1), mesh=pj.data_mesh())
    try:
        other.step(
            other.init(init_params()), train.batch(mine), shared | {"scale": rank}
        )
    except ValueError as error:
        return found, str(error)


def inside():
    """Trains a loss that exchanges inside each process, at widths 2 and 3."""
    mesh, out = pj.data_mesh(axis_name=("host", "device")), {}
    for width in (2, 3):
        train, state = own_collectives.make("inside", mesh, width)
        out[str(width)] = bits(own_collectives.trained(train, state, 100).params)
    return {"executor": train.executor.name, "params": out}


def own_collective(name, width):
    """Returns the choice of "auto", its result, the error of "host" and transfers."""
    train, state = own_collectives.make(name, pj.data_mesh(), int(width))
    (batch,) = batches(1)
    shapes = jax.eval_shape(lambda: batch)
    sent = [tuple(x) for x in train.transfers(state, shapes)]
    state = own_collectives.trained(train, state)
    host, first = own_collectives.make(name, pj.data_mesh(), int(width), "host")
    try:
        own_collectives.trained(host, first)
        said = None
    except ValueError as error:
        said = str(error)
    host.join()
    return {
        "executor": train.executor.name,
        "reason": train.executor.reason,
        "said": said,
        "sent": sent,
        "params": bits(state.params),
        "model_state": bits(state.model_state),
    }


def interrupted(folder):
    """Rank 1 stops sending, and rank 0 waits for it until it is interrupted."""
    # SIGINT is ignored if the tests run in the background of a shell. The process
    # inherits this.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    train = pj.make_train_step(loss_fn, optax.sgd(0.1), mesh=pj.data_mesh())
    state = run(train, 2)
    rank = jax.process_index()
    (pathlib.Path(folder) / f"waiting{rank}").touch()
    if rank == 1:
        time.sleep(600)
    run(train, 2, state)


def fails():
    """Rank 1 raises an error; the others answer."""
    if jax.process_index() == 1:
        raise ValueError("none")


def ends():
    """Rank 1 ends without an answer."""
    if jax.process_index() == 1:
        sys.stderr.write("its last words\n")
        sys.stderr.flush()
        os._exit(7)


def sleeps():
    """Rank 1 does not answer."""
    if jax.process_index() == 1:
        time.sleep(600)


def of_snapshots(name):
    """Returns a task whose module is imported when it is first asked for."""

    def task(*arguments):
        from ...checkpoint.snapshots import tasks

        return getattr(tasks, name)(*arguments)

    return task


TASKS = {
    **{
        name: of_snapshots(name)
        for name in (
            *("trained", "rolled_back"),
            *("differing_extras", "closed", "failing_copy"),
        )
    },
    "rank": jax.process_index,
    "stateful": stateful,
    "exact": exact,
    "fed": fed,
    "apart": apart,
    "coded": coded,
    "frozen": frozen,
    "partly_delayed": partly_delayed,
    "saved": saved,
    "restored": restored,
    "saved_and_restored": saved_and_restored,
    "opened": opened,
    "opened_apart": opened_apart,
    "saved_in_turn": saved_in_turn,
    "refused": refused,
    "restored_from_damage": restored_from_damage,
    "extras_of_each": extras_of_each,
    "restored_beside_a_deletion": restored_beside_a_deletion,
    "overlapping": overlapping,
    "inside": inside,
    "keyed": keyed,
    "differing": differing,
    "unlike": unlike,
    "shares": shares,
    "own_collective": own_collective,
    "interrupted": interrupted,
    "fails": fails,
    "ends": ends,
    "sleeps": sleeps,
    "sharded": sharded.saved_and_continued,
    "sharded_fed": sharded.fed,
    "local_steps": local_steps.trained,
    "written_back": local_steps.written_back,
    "pieces": pieces.saved_and_continued,
    "drawn": mixed.drawn,
    "of_kinds": mixed.of_kinds,
}

if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
