"""One of two processes over Gloo: `python -m tests.executors.worker TASK RANK PORT`.

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
from pipejax import codecs, collectives

from ..helpers import batches, init_params, loss_fn

SECONDS = 0.25  # what a step computes, and what its communication takes


def main(task, rank, port):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
    say(json.dumps(TASKS[task](rank)))


def say(line):
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def run(train, steps, state=None):
    """The final state, drained; each process gives its half of every batch."""
    state = train.init(init_params()) if state is None else state
    place = NamedSharding(train.mesh, P("data"))
    for batch in batches(steps):
        mine = jax.tree.map(lambda x: np.split(x, 2)[jax.process_index()], batch)
        share = functools.partial(jax.make_array_from_process_local_data, place)
        state, _ = train.step(state, jax.tree.map(share, mine))
    return train.drain(state)


def exact(rank):
    """The executor chosen, and the bits of the parameters at widths 1, 2 and 3."""
    out = {}
    for width in (1, 2, 3):
        train = pj.make_train_step(
            loss_fn, optax.adamw(1e-2), mesh=pj.data_mesh(), width=width
        )
        out[str(width)] = bits(run(train, 6).params)
    executor = train.executor
    return {"executor": executor.name, "reason": executor.reason, "params": out}


def exchanges():
    """Algorithms with codecs that have a state; made once there are devices."""
    key = jax.random.key(0)
    return {
        "two_shot": collectives.two_shot(codecs.error_feedback(codecs.int4(8))),
        "ring": collectives.ring(codecs.stochastic(codecs.int8(8), key)),
        "psum": collectives.psum(codecs.error_feedback(codecs.power_sgd(1, key))),
    }


def coded(rank):
    """The bits of the parameters under each of them, at width 2."""
    out = {}
    for name, all_reduce in exchanges().items():
        train = pj.make_train_step(
            loss_fn, optax.adamw(1e-2), mesh=pj.data_mesh(), all_reduce=all_reduce
        )
        out[name] = bits(run(train, 6).params)
    return out


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


TASKS = {"exact": exact, "coded": coded, "late": late, "interrupted": interrupted}

if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
