"""One of several processes over Gloo: `python -m tests.executors.worker TASK ...`.

Prints one JSON line: what the test reads.
"""

import functools
import json
import signal
import sys
import time

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax import checkpoint, codecs, collectives

from ..helpers import batches, init_params, loss_fn

SECONDS = 0.25  # what a step computes, and what its communication takes


def main(task, rank, processes, port, *folder):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, rank)
    say(json.dumps(TASKS[task](*folder or [rank])))


def say(line):
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def run(train, steps, state=None, *, drained=True):
    """The final state; each process gives its share of every batch."""
    state = train.init(init_params()) if state is None else state
    place = NamedSharding(train.mesh, P("data"))
    rank, processes = jax.process_index(), jax.process_count()
    for batch in batches(steps):
        mine = jax.tree.map(lambda x: np.split(x, processes)[rank], batch)
        share = functools.partial(jax.make_array_from_process_local_data, place)
        state, _ = train.step(state, jax.tree.map(share, mine))
    return train.drain(state) if drained else state


def in_rank_order(processes):
    """Of two a sum has one order; of more, Gloo has an order of its own."""
    return collectives.psum() if processes == 2 else collectives.two_shot()


def exact(rank):
    """The executor chosen, and the bits of the parameters at widths 1, 2 and 3."""
    out = {}
    for width in (1, 2, 3):
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


def exchanges(processes):
    """Algorithms with codecs that have a state; made once there are devices."""
    key = jax.random.key(0)
    low_rank = codecs.error_feedback(codecs.power_sgd(1, key))
    whole = collectives.psum if processes == 2 else collectives.tree
    return {
        "two_shot": collectives.two_shot(codecs.error_feedback(codecs.int4(8))),
        "ring": collectives.ring(codecs.stochastic(codecs.int8(8), key)),
        "low rank": whole(low_rank),
    }


def coded(rank):
    """The bits of the parameters under each of them, at width 2."""
    out = {}
    for name, all_reduce in exchanges(jax.process_count()).items():
        train = pj.make_train_step(
            loss_fn, optax.adamw(1e-2), mesh=pj.data_mesh(), all_reduce=all_reduce
        )
        out[name] = bits(run(train, 6).params)
    return out


def fed_back(devices):
    """A train step whose state has residuals, and gradients in flight."""
    all_reduce = collectives.two_shot(codecs.error_feedback(codecs.int4(8)))
    return pj.make_train_step(
        loss_fn, optax.adamw(1e-2), mesh=pj.data_mesh(devices), all_reduce=all_reduce
    )


def saved(folder):
    """Four steps, then a checkpoint."""
    train = fed_back(jax.device_count())
    state = run(train, 4, drained=False)
    train.executor.join()
    with checkpoint.manager(folder) as manager:
        checkpoint.save(manager, state)


def restored(folder):
    """From a checkpoint, four steps more: the bits of the parameters."""
    train = fed_back(jax.device_count())
    with checkpoint.manager(folder) as manager:
        state = checkpoint.restore(manager, train, train.init(init_params())).state
    return bits(run(train, 4, state).params)


def bits(params):
    return {name: np.asarray(x).tobytes().hex() for name, x in params.items()}


def slow_loss(params, batch):
    def wait(x):
        time.sleep(SECONDS)
        return x

    loss = loss_fn(params, batch)
    return loss + 0 * jax.pure_callback(wait, loss, jax.lax.stop_gradient(loss))


def late(rank):
    """Seconds a step, at widths 1 and 2, where rank 1's sums come late."""
    out = {}
    for width in (1, 2):
        train = pj.make_train_step(
            slow_loss, optax.sgd(0.1), mesh=pj.data_mesh(), width=width
        )
        delay(train.executor, SECONDS * rank)
        run(train, 2)
        start = time.perf_counter()
        run(train, 8)
        out[str(width)] = (time.perf_counter() - start) / 8
    return out


def delay(executor, seconds):
    reduce = executor._reduce

    def slow(*args):
        time.sleep(seconds)
        return reduce(*args)

    executor.__dict__["_reduce"] = slow  # where cached_property keeps it


def interrupted(rank):
    """Rank 1 stops sending; rank 0 waits for it until it is interrupted."""
    # Where the tests run in the background of a shell, it is ignored, and inherited so.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    train = pj.make_train_step(loss_fn, optax.sgd(0.1), mesh=pj.data_mesh())
    state = run(train, 2)
    say("waiting")
    if rank == 1:
        time.sleep(600)
    run(train, 2, state)


TASKS = {
    "exact": exact,
    "coded": coded,
    "saved": saved,
    "restored": restored,
    "late": late,
    "interrupted": interrupted,
}

if __name__ == "__main__":
    task, rank, processes, port, *folder = sys.argv[1:]
    main(task, int(rank), int(processes), int(port), *folder)
