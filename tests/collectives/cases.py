"""Compiles one program for each algorithm and codec, which the tests share."""

import functools
import math
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax import codecs, collectives
from pipejax._internal.mesh import on_mesh
from pipejax.collectives import Layout

from ..grid import covering
from . import reference

KEY = jax.random.key(0)
ALGORITHMS = {
    "psum": collectives.psum,
    "ring": collectives.ring,
    "two_shot": collectives.two_shot,
    "halving_doubling": collectives.halving_doubling,
    "tree": collectives.tree,
    "parameter_server": collectives.parameter_server,
    "hierarchical": lambda codec=None: collectives.hierarchical(
        outer=collectives.two_shot(codec)
    ),
}
WHOLE = ("psum", "tree", "parameter_server")  # these cut no vector into pieces
feedback = codecs.error_feedback
CODECS = {
    "int8": codecs.int8(),
    "int4": codecs.int4(8),
    "quantize": codecs.quantize(),
    "truncate+feedback": feedback(codecs.truncate()),
    "bf16": codecs.bf16(),
    "fp8": codecs.fp8(block=16),
    "fp4": codecs.fp4(8),
    "int2+feedback": feedback(codecs.int2(8)),
    "sign+feedback": feedback(codecs.sign(8)),
    "top_k+feedback": feedback(codecs.top_k(0.1)),
    "random_k": codecs.random_k(0.2, KEY),
    "rotated int4": codecs.rotated(codecs.int4(8), KEY, block=16),
    "stochastic int8": codecs.stochastic(codecs.int8(16), KEY),
    "power_sgd+feedback": feedback(codecs.power_sgd(1, KEY)),
    "acp_sgd+feedback": feedback(codecs.acp_sgd(1, KEY)),
}


def allowed(algorithm, codec):
    if codec in ("power_sgd+feedback", "acp_sgd+feedback"):
        return algorithm in WHOLE
    return algorithm != "psum" or codec == "random_k"


PAIRS = [(a, c) for a in ALGORITHMS for c in CODECS if allowed(a, c)]
RANDOM = ("random_k", "rotated int4", "stochastic int8")


class Case(NamedTuple):
    """An algorithm and a codec on some devices, for vectors of one layout."""

    algorithm: str
    codec: str | None
    devices: int
    layout: Layout
    hosts: int | None = None

    @property
    def axis(self):
        return "data" if self.hosts is None else ("host", "device")

    @property
    def mesh(self):
        names = {"axis_name": self.axis, "hosts": self.hosts}
        return pj.data_mesh(self.devices, **names)

    @property
    def all_reduce(self):
        make = ALGORITHMS[self.algorithm]
        return make() if self.codec is None else make(CODECS[self.codec])

    def vectors(self, seed=0):
        rng = np.random.default_rng(seed)
        return rng.normal(size=(self.devices, self.size)).astype(self.dtype)

    @property
    def size(self):
        return self.layout.coded_size + self.layout.exact_size

    @property
    def dtype(self):
        return self.layout.coded[0].dtype.name


def case(algorithm, codec, devices, n, exact=0, dtype="float32"):
    """Makes a case with `n` elements that may be coded, most of them in one matrix."""
    rows = n // 10
    layout = Layout.of_shapes(((rows, 9), (n - 9 * rows,)), dtype, exact=exact)
    hosts = {1: 1, 2: 2, 3: 3, 4: 2, 5: 1, 6: 2, 7: 7, 8: 4}[devices]
    if algorithm != "hierarchical":
        hosts = None
    return Case(algorithm, codec, devices, layout, hosts)


# One program serves all tests of an algorithm with a codec. The codecs on four devices
# compile quickly: two have no state, one has.
ON_FOUR = ("int8", "bf16", "sign+feedback")
COMBINATIONS = [(a, c, p) for p in (3, 4) for a, c in PAIRS if p == 3 or c in ON_FOUR]
GRID = [
    case(a, c, p if a != "hierarchical" else 2 * (p - 1), 1000, exact=3)
    for a, c, p in COMBINATIONS
]
# The quick run covers every algorithm, every codec, and one codec with a state under
# every algorithm that accepts it.
_COVERED = covering(COMBINATIONS, 1)
QUICK = [
    each
    for number, each in enumerate(GRID)
    if number in _COVERED or (each.codec, each.devices) == ("sign+feedback", 3)
]


def in_dtype(each, dtype):
    """Returns the same case for vectors of another dtype."""
    shapes, exact = each.layout.shapes, each.layout.exact_size
    return each._replace(layout=Layout.of_shapes(shapes, dtype, exact=exact))


# In float64 programs of this pair, LLVM contracts `min + q level` in spite of
# `EXACT_BITS` if the processor has multiply-add instructions. `make check` excludes
# these instructions.
MULTIPLY_ADDS = "max_isa" not in os.environ.get("XLA_FLAGS", "")
CONTRACTED = {("halving_doubling", "quantize")} if MULTIPLY_ADDS else set()
FLOAT64 = [
    in_dtype(each, "float64")
    for each in GRID
    if (each.algorithm, each.codec) not in CONTRACTED
]


def every(cases, quick=QUICK):
    """Parametrizes a test with `cases`, as `each`, of which `quick` are quick."""
    return pytest.mark.parametrize(
        "each",
        [
            pytest.param(
                case,
                id=f"{case.algorithm}-{case.codec}-{case.devices}",
                marks=() if in_dtype(case, "float32") in quick else pytest.mark.full,
            )
            for case in cases
        ],
    )


class Program(NamedTuple):
    """The compiled program of a case, and the transfers that its stages declare."""

    init: Any
    step: jax.stages.Compiled
    text: str
    transfers: tuple


@functools.cache
def program(case):
    """Compiles a case. Row i of vectors and states, [p, ...], belongs to device i."""
    own, mesh, found = P(case.axis), case.mesh, []

    def init():
        return rows(stages().init())

    def stages():
        return case.all_reduce(case.layout, case.axis)

    def rows(tree):
        return jax.tree.map(lambda x: x[None], tree)

    def step(vectors, states):
        found.append(stages().transfers)
        vector, states = jax.tree.map(lambda x: x[0], (vectors, states))
        return rows(summed(case.layout, stages(), vector, states))

    make = jax.jit(on_mesh(init, mesh, (), own))
    states = jax.eval_shape(make)
    if jax.tree.leaves(states):
        states = jax.tree.map(np.asarray, make())
    vectors = jax.ShapeDtypeStruct((case.devices, case.size), case.dtype)
    lowered = jax.jit(
        on_mesh(step, mesh, own, own), compiler_options=reference.EXACT_BITS
    ).lower(vectors, states)
    return Program(states, lowered.compile(), lowered.as_text(), found[0])


def summed(layout, stages, vector, states=None):
    """Sums a vector in which the arrays of a layout lie one after another."""
    sums, states = collectives.run(stages, apart(layout, vector), states)
    return jnp.concatenate([x.reshape(-1) for x in sum(sums, ())]), states


def apart(layout, vector):
    arrays = []
    for form in (*layout.coded, *layout.exact):
        size = math.prod(form.shape)
        arrays.append(vector[:size].reshape(form.shape))
        vector = vector[size:]
    count = len(layout.coded)
    return collectives.Summands(tuple(arrays[:count]), tuple(arrays[count:]))


def run(case, vectors, states=None):
    """Returns the sums [p, n] and the states [p, ...] of the compiled program."""
    found = program(case)
    out = found.step(jnp.asarray(vectors), found.init if states is None else states)
    return jax.tree.map(np.asarray, out)


def expected(case, vectors, states=None):
    """Returns the sums and states of the reference twin."""
    ref = getattr(reference, case.algorithm + "_ref")
    if case.hosts is not None:
        ref = functools.partial(ref, hosts=case.hosts)
    states = program(case).init if states is None else states
    dtype = "float64" if vectors.dtype == "float64" else "float32"
    each = [jax.tree.map(lambda x, i=i: x[i], states) for i in range(case.devices)]
    send = reference.Exactly()
    if case.codec is not None:
        send = reference.Coded(_of(case.codec, case.layout.shapes, dtype), each)
    n = case.layout.coded_size
    x = np.asarray(vectors, dtype)
    with np.errstate(over="ignore", invalid="ignore"):  # XLA has no warnings either
        coded = ref(list(x[:, :n]), send)
        tail = ref(list(x[:, n:]), reference.Exactly())
    sums = np.concatenate([coded, tail], axis=1).astype(vectors.dtype)
    return sums, jax.tree.map(lambda *xs: np.stack(xs), *each)


@functools.cache
def _of(codec, shapes, dtype):
    return CODECS[codec].of(shapes, dtype)
