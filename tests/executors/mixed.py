"""
Runs several train steps of one program in a random order, against NumPy by hand.

Each step trains a linear model of its own with a plain delay, so that the recursion by
hand needs nothing but a queue of gradients. All models have the same size: a sum that
meets that of another step is wrong, and not only an error.
"""

import gc

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pipejax as pj

RATE, SHAPE, EXAMPLES = 0.3, (64, 65), 4
TOLERANCE = 1e-4
"""
The largest error of a parameter, which is of order 1.

A hundred float32 updates, each with a sum of 64 products, are a hundred times nearer.
"""
KINDS = {
    "host": {},
    "wide": {"width": 3},
    "synchronous": {"width": 1},
    "fused": {"executor": "fused"},
    "sharded optimizer": {"shard_optimizer": True},
    "sharded": {},
    "both": {"shard_optimizer": True},
}
"""Kinds of train steps, beside "pipelined". The last two shard the model."""
SHARDED = ("sharded", "both")


def loss_fn(params, batch):
    return ((batch["x"] @ params - batch["y"]) ** 2).mean()


class ByHand:
    """The recursion w_t = w_{t-1} - r g_{t-K}, in float64."""

    def __init__(self, params, width):
        self.params, self.width, self.queue = params.astype(np.float64), width, []

    def step(self, parts):
        """Takes the mean gradient of all processes' parts of a batch."""
        errors = [x["x"].astype(np.float64) @ self.params - x["y"] for x in parts]
        pairs = zip(parts, errors, strict=True)
        gradients = [2 * x["x"].T @ error / error.size for x, error in pairs]
        self.queue.append(sum(gradients) / len(parts))
        self._apply(self.width - 1)

    def drain(self):
        self._apply(0)

    def _apply(self, most):
        while len(self.queue) > most:
            self.params = self.params - RATE * self.queue.pop(0)


class Run:
    """A train step with its state, as the program under test has it."""

    def __init__(self, kind, params):
        axis_name = ("host", "device") if kind in SHARDED else "data"
        mesh = pj.data_mesh(axis_name=axis_name)
        self.inner = kind in SHARDED
        self.train = pj.make_train_step(
            loss_fn,
            optax.sgd(RATE),
            mesh=mesh,
            axis_name="host" if self.inner else "data",
            weight_prediction=False,
            **KINDS[kind],
        )
        if self.inner:
            self.train.join()
            params = jax.device_put(params, NamedSharding(mesh, P("device")))
        self.width, self.state = self.train.width, self.train.init(params)

    @property
    def params(self):
        return self.state.params

    def step(self, part):
        axes = ("host", "device") if self.inner else None
        batch = self.train.batch(part, axis_name=axes)
        self.state, _ = self.train.step(self.state, batch)

    def drain(self):
        self.state, _ = self.train.drain(self.state)


class Loop:
    """A loop of a user's own with `pj.pipelined`, which nothing can drain."""

    width = 2

    def __init__(self, params, join):
        mesh, tx = pj.data_mesh(), pj.pipelined(optax.sgd(RATE), "data", self.width)
        specs = pj.state_specs(jax.eval_shape(tx.init, params))
        self.data, self.join = NamedSharding(mesh, P("data")), join

        def local(params, state, batch):
            gradient = jax.grad(loss_fn)(params, batch)
            updates, state = tx.update(gradient, state, params)
            return optax.apply_updates(params, updates), state

        def program(local, given, results):
            options = {"in_specs": given, "out_specs": results, "check_vma": False}
            return jax.jit(jax.shard_map(local, mesh=mesh, **options))

        self.program = program(local, (P(), specs, P("data")), (P(), specs))
        join()
        self.params = jax.device_put(params, NamedSharding(mesh, P()))
        self.state = program(tx.init, P(), specs)(self.params)

    def step(self, part):
        whole = {
            name: jax.make_array_from_process_local_data(self.data, x)
            for name, x in part.items()
        }
        self.join()  # the library does not launch this program
        self.params, self.state = self.program(self.params, self.state, whole)


def mixed(seed, count, *kinds):
    """
    Runs a program of `count` random actions on one train step of each kind.

    Returns the largest error of any parameter at the end, on this process.
    """
    rng = np.random.default_rng(int(seed))
    rank, processes = jax.process_index(), jax.process_count()

    def normal(*shape):
        return np.float32(rng.normal(size=shape))

    def make(kind):
        params = normal(*SHAPE)
        loops = kind == "pipelined"
        run = Loop(params, runs[0].train.join) if loops else Run(kind, params)
        return run, ByHand(params, run.width)

    runs, hands = [], []
    for kind in kinds:
        run, hand = make(kind)
        runs.append(run)
        hands.append(hand)
    for _ in range(int(count)):
        number, action = rng.integers(len(runs)), rng.random()
        run, hand = runs[number], hands[number]
        if action < 0.8 or (action < 0.9 and kinds[number] == "pipelined"):
            parts = [
                {"x": normal(EXAMPLES, SHAPE[0]), "y": normal(EXAMPLES, SHAPE[1])}
                for _ in range(processes)
            ]
            run.step(parts[rank])
            hand.step(parts)
        elif action < 0.9:
            run.drain()
            hand.drain()
        elif action < 0.95:  # dropped with what it has in flight, and made anew
            runs[number] = run = None
            if rank == 0:  # processes collect their garbage when they like
                gc.collect()
            runs[number], hands[number] = make(kinds[number])
        else:
            runs[0].train.join()
            total = multihost_utils.process_allgather(np.float32(rank)).sum()
            assert total == processes * (processes - 1) / 2
    for run, hand, kind in zip(runs, hands, kinds, strict=True):
        if kind != "pipelined":
            run.drain()
            hand.drain()
    runs[0].train.join()
    return max(
        float(np.abs(np.asarray(shard.data) - hand.params[shard.index]).max())
        for run, hand in zip(runs, hands, strict=True)
        for shard in run.params.addressable_shards
    )
