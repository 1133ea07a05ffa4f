"""Programs measured on a mesh: each alone, all in turn."""

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pipejax.collectives import AllReduce, Layout, Stages, Summands, psum, run
from pipejax.mesh import on_mesh

from ._leaves import square_leaves


class Case(NamedTuple):
    """An all-reduce of one vector a device, which holds the leaves of `square_leaves`.

    Attributes:
      all_reduce: the algorithm, with its codec.
      elements: of the vector, float32.
    """

    all_reduce: AllReduce
    elements: int


def exchange_times(
    mesh: Mesh, cases: Mapping[str, Case], rounds: int
) -> dict[str, list[float]]:
    """Seconds until all devices are done, by round; in each round all run in turn.

    In a run of several processes, all must call it.

    Args:
      mesh: over all of whose axes is summed.
      cases: what to time, by name.
      rounds: how often.
    """
    programs = {name: Program(mesh, case) for name, case in cases.items()}
    return in_turn(mesh, programs, rounds)


def in_turn(
    mesh: Mesh, programs: Mapping[str, Callable[[], Any]], rounds: int
) -> dict[str, list[float]]:
    """Seconds of what returns when it is done: until it is on all processes, by round.

    Each is called once before. Before each turn there is a barrier, so that nobody
    begins while others are still at the one before, and all that share a core do.
    """
    barrier = Program(mesh, Case(psum(), 1))
    barrier()  # compiles
    for program in programs.values():
        program()
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            barrier()
            start = time.perf_counter()
            program()
            times[name].append(time.perf_counter() - start)
    return _slowest(times)


def check_several(mesh: Mesh) -> None:
    """A ValueError for a mesh of one device, which exchanges nothing."""
    if mesh.size == 1:
        raise ValueError(
            "`mesh` must have several devices, got one. Run this on every host, after"
            " jax.distributed.initialize()."
        )


def _slowest(times: dict[str, list[float]]) -> dict[str, list[float]]:
    """Of all processes: one that has sent its last is not done before the others."""
    own = np.array([*times.values()])
    every = multihost_utils.process_allgather(own).reshape(-1, *own.shape)
    return dict(zip(times, every.max(axis=0).tolist(), strict=True))


class Program:
    """One case, with the arrays it sums and its codecs' states.

    Attributes:
      axis: or axes, over which is summed.
      summands: all devices' own, one after another.
      states: of the codecs, likewise.
    """

    def __init__(self, mesh: Mesh, case: Case) -> None:
        self.axis = mesh.axis_names if len(mesh.axis_names) > 1 else mesh.axis_names[0]
        self._case = case
        self._layout = Layout.of_shapes(square_leaves(case.elements))
        own = P(self.axis)

        def init() -> Any:
            return self.stages().init()

        def local(summands: Summands, states: Any) -> Any:
            return run(self.stages(), summands, states)

        place = NamedSharding(mesh, own)
        rng = np.random.default_rng(jax.process_index())

        def made(form: jax.ShapeDtypeStruct) -> jax.Array:
            rows, *rest = form.shape
            mine = rng.normal(size=(len(mesh.local_devices) * rows, *rest))
            return jax.make_array_from_process_local_data(
                place, mine.astype(form.dtype)
            )

        self.summands = Summands(tuple(map(made, self._layout.coded)))
        self.states = jax.jit(on_mesh(init, mesh, (), own))()
        self._step = jax.jit(on_mesh(local, mesh, (own, own), (P(), own)))

    def stages(self) -> Stages:
        """Of its all-reduce, inside `shard_map`."""
        return self._case.all_reduce(self._layout, self.axis)

    def __call__(self) -> None:
        total, self.states = self._step(self.summands, self.states)
        jax.block_until_ready(total)
