"""Measures how long programs take on a mesh, each alone and all in turn."""

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pipejax._core.executors import join
from pipejax._internal.mesh import AxisName, axes, on_mesh
from pipejax.collectives import AllReduce, Layout, Stages, Summands, psum, run

from ._leaves import square_leaves


class Case(NamedTuple):
    """An all-reduce to measure: an algorithm, and the size of each device's vector.

    The vector has the leaves of `pj.timing.square_leaves`, so that `power_sgd` has
    matrices to compress.

    Attributes:
      all_reduce: The algorithm with its codec, such as `pj.collectives.ring()`.
      elements: The number of float32 elements of each device's vector.
    """

    all_reduce: AllReduce
    elements: int


def exchange_times(
    mesh: Mesh,
    cases: Mapping[str, Case],
    rounds: int,
    *,
    axis_name: AxisName | None = None,
) -> dict[str, list[float]]:
    """Measures how long each all-reduce takes until all devices are done.

    In a run of several processes, all of them must call this function. Each all-reduce
    runs as a single program, whereas `profile` measures its phases separately.

    Args:
      mesh: The mesh.
      cases: The all-reduces to measure, by name.
      rounds: The number of measurement rounds. In each round, all cases run in turn, so
        that a disturbance affects all of them.
      axis_name: The axis, or the axes, over which vectors are summed, at the same time
        at all places along the others. `None` stands for all axes.

    Returns:
      The seconds of each case by name, one for each round, measured at the process
      that takes longest.
    """
    programs = {
        name: CompiledAllReduce(mesh, case, axis_name) for name, case in cases.items()
    }
    return in_turn(mesh, programs, rounds)


def in_turn(
    mesh: Mesh, programs: Mapping[str, Callable[[], Any]], rounds: int
) -> dict[str, list[float]]:
    """Measures how long each program takes until it is done on all processes.

    Returns the seconds of each program at the slowest process, one for each round.
    """
    join()  # No train step may reduce meanwhile.
    barrier = CompiledAllReduce(mesh, Case(psum(), 1))
    barrier()  # compiles it
    for program in programs.values():
        program()
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            # All processes start at the same time. No process is then still busy with
            # the run before, and processes that share a core do so in every run.
            barrier()
            start = time.perf_counter()
            program()
            times[name].append(time.perf_counter() - start)
    own = np.array([*times.values()])
    # A process that has sent its last message may be done before the others have
    # received theirs.
    every = multihost_utils.process_allgather(own).reshape(-1, *own.shape)
    return dict(zip(times, every.max(axis=0).tolist(), strict=True))


def check_several(mesh: Mesh) -> None:
    if mesh.size == 1:
        raise ValueError(
            "`mesh` must have several devices, got one. Run this on every host, after"
            " jax.distributed.initialize()."
        )


class CompiledAllReduce:
    """A compiled all-reduce, with the arrays that it sums and its codec states."""

    def __init__(
        self, mesh: Mesh, case: Case, axis_name: AxisName | None = None
    ) -> None:
        every = mesh.axis_names
        self.axis = axis_name or (every if len(every) > 1 else every[0])
        self._case = case
        self._layout = Layout.of_shapes(square_leaves(case.elements))
        own = P(every)
        others = tuple(name for name in every if name not in axes(self.axis))

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
        # All devices of the sum have the same. Their states differ.
        total = P(others) if others else P()
        self._step = jax.jit(on_mesh(local, mesh, (own, own), (total, own)))

    def stages(self) -> Stages:
        """Returns the stages of the all-reduce; call this inside `shard_map`."""
        return self._case.all_reduce(self._layout, self.axis)

    def __call__(self) -> None:
        total, self.states = self._step(self.summands, self.states)
        jax.block_until_ready(total)
