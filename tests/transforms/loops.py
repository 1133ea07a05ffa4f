"""Provides every transform, and a loop that runs one on four devices."""

import functools
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax import codecs, collectives, transforms

DEVICES, STEPS = 4, 3
HOSTS = ("host", "device")
KEY = jax.random.key(0)
# LLVM's optimizations contract multiply-adds in one way inside a loop and in another
# outside. Without them, the bits are the same and compilation takes half the time.
QUICKLY: dict[str, Any] = {
    "compiler_options": {
        "xla_backend_optimization_level": 0,
        "xla_cpu_experimental_ynn_fusion_type": "",
    }
}

sign = codecs.error_feedback(codecs.sign(8))
power_sgd = codecs.error_feedback(codecs.power_sgd(1, KEY))
top_k = codecs.error_feedback(codecs.top_k(0.2))
random_k = codecs.error_feedback(codecs.random_k(0.2, KEY, scaled=False))
int4, int8, bf16 = codecs.int4(8), codecs.int8(16), codecs.bf16()


def hierarchical(codec=None):
    return collectives.hierarchical(outer=collectives.two_shot(codec))


def mean(all_reduce, width=1, axis="data"):
    return transforms.pipelined_mean(axis, width, all_reduce=all_reduce)


LOCAL = {
    "compress int8": transforms.compress(int8),
    "compress bf16": transforms.compress(bf16),
    "compress stochastic": transforms.compress(codecs.stochastic(int4, KEY)),
    "compress random_k": transforms.compress(codecs.random_k(0.5, KEY)),
    "compress sign": transforms.compress(sign),
    "compress top_k": transforms.compress(top_k),
    "compress power_sgd": transforms.compress(power_sgd),
}
MEANS = {
    "psum": mean(collectives.psum()),
    "psum power_sgd": mean(collectives.psum(power_sgd)),
    "psum random_k": mean(collectives.psum(random_k)),
    "ring int8": mean(collectives.ring(int8)),
    "two_shot": mean(collectives.two_shot()),
    "two_shot int8": mean(collectives.two_shot(int8)),
    "two_shot sign": mean(collectives.two_shot(sign)),
    "halving_doubling bf16": mean(collectives.halving_doubling(bf16)),
    "tree top_k": mean(collectives.tree(top_k)),
    "parameter_server int4": mean(collectives.parameter_server(int4)),
    "hierarchical int8": mean(hierarchical(int8), axis=HOSTS),
    "pipelined 2": mean(collectives.psum(), 2),
    "pipelined 2 sign": mean(collectives.two_shot(sign), 2),
}
TRANSFORMS = LOCAL | MEANS
# Each of these differs from another transform above only in its codec or algorithm, and
# `tests/collectives` tests every codec under every algorithm.
VARIANTS = {
    *("compress bf16", "compress top_k", "psum", "psum power_sgd", "ring int8"),
    "psum random_k",
    *("two_shot", "halving_doubling bf16", "tree top_k", "parameter_server int4"),
    *("pipelined 2", "compress int8", "compress random_k", "two_shot int8"),
}


def axis_of(name):
    return HOSTS if name.startswith("hierarchical") else "data"


def random_like(tree, lead, seed=0):
    """Returns normal random numbers, [*lead, ...] for every leaf."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: rng.normal(size=(*lead, *x.shape)).astype(x.dtype), tree
    )


class Loop:
    """Updates device i with gradients[t, i] in step t, and counts the traces."""

    def __init__(self, tx, like, axis="data", **extra):
        self.tx, self.like, self.axis, self.traces = tx, like, axis, 0
        hosts = None if axis == "data" else 2
        mesh = pj.data_mesh(DEVICES, axis_name=axis, hosts=hosts)
        self.mapped = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
        init = self.mapped(lambda: tx.init(like), in_specs=(), out_specs=P(axis))
        self.specs = pj.state_specs(jax.eval_shape(init), axis)
        self.init = jax.jit(
            self.mapped(lambda: tx.init(like), in_specs=(), out_specs=self.specs)
        )

        def local(state, gradients):
            self.traces += 1
            mine = jax.tree.map(lambda g: g[0], gradients)
            updates, state = tx.update(mine, state, like, **extra)
            return state, jax.tree.map(lambda u: u[None], updates)

        own = P(axis)
        self.update = self.mapped(
            local, in_specs=(self.specs, own), out_specs=(self.specs, own)
        )
        self.step = jax.jit(self.update, **QUICKLY)
        self.scan = jax.jit(functools.partial(lax.scan, self.update), **QUICKLY)

    def run(self, gradients):
        """Returns the updates [steps, devices, ...] and the last state."""
        state, out, before = self.init(), [], self.traces
        for t in range(len(jax.tree.leaves(gradients)[0])):
            state, updates = self.step(
                state, jax.tree.map(lambda g, t=t: g[t], gradients)
            )
            out.append(jax.tree.map(np.asarray, updates))
        assert self.traces <= before + 1
        return jax.tree.map(lambda *us: np.stack(us), *out), state
