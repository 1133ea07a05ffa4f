"""Profiles: how long an all-reduce spends on encoding, waiting, bytes and additions."""

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pipejax._core.executors import join
from pipejax._internal.mesh import on_mesh
from pipejax.collectives import phases, psum

from ._stopwatch import Case, CompiledAllReduce, check_several


class Profile(NamedTuple):
    """The seconds of an all-reduce, split by phase and averaged over processes.

    Attributes:
      encode: Seconds to make the payloads that are sent.
      wait: Seconds to wait for other devices before the collectives.
      first: Seconds of the collectives in the first half: a reduce-scatter, the way up
        a tree, or all of a `psum` without a codec.
      reduction: Seconds to decode received payloads and to add them.
      second: Seconds of the collectives in the second half: an all-gather, or the way
        down a tree.
      decode: Seconds to make the resulting arrays from the last payloads received.
      launch: Seconds to launch programs and messages, which even a vector of one
        element takes.
    """

    encode: float
    wait: float
    first: float
    reduction: float
    second: float
    decode: float
    launch: float

    @property
    def total(self) -> float:
        """The seconds of all phases; a single program for all of them may take less."""
        return sum(self)


PHASES = Profile._fields[:-1]


def profile(mesh: Mesh, cases: Mapping[str, Case], rounds: int) -> dict[str, Profile]:
    """Measures how long each phase of each all-reduce takes.

    In a run of several processes, all of them must call this function. `exchange_times`
    instead measures an all-reduce as a single program. This function works as follows:

    1. Before each collective, the devices meet at a barrier. The time that they spend
       there, beyond the time that the barrier itself takes, is `wait`.
    2. Each phase runs as a program of its own. Its time is `encode`, `first`,
       `reduction`, `second` or `decode`.
    3. The same phases run with a vector of one element. The part of a phase's time that
       this takes as well is moved to `launch`.

    Args:
      mesh: The mesh. Vectors are summed over all of its axes.
      cases: The all-reduces to profile, by name.
      rounds: The number of measurement rounds. In each round, all cases run in turn.

    Returns:
      The profiles by name, as medians over rounds of means over processes.

    Raises:
      ValueError: If `mesh` has a single device, which exchanges nothing.
    """
    check_several(mesh)
    join()  # No train step may reduce meanwhile.
    barrier = CompiledAllReduce(mesh, Case(psum(), 1))
    chains = {
        name: (_Chain(mesh, case), _Chain(mesh, case._replace(elements=1)))
        for name, case in cases.items()
    }
    runs: dict[str, list[Any]] = {name: [] for name in cases}
    for number in range(rounds + 1):
        for name, pair in chains.items():
            times = [chain(barrier) for chain in pair]
            if number:  # the first round compiles
                runs[name].append(times)
    return {name: _profile(np.array(times)) for name, times in runs.items()}


def _profile(times: np.ndarray) -> Profile:
    """Returns the profile for the seconds `[rounds, 2, phases]` on this process."""
    # The second axis of `times` has the whole vector, and the vector of one element.
    every = multihost_utils.process_allgather(times).reshape(-1, *times.shape)
    whole, short = np.median(every.mean(axis=0), axis=0)
    # Noise may make one element slower than the whole vector.
    launch = np.minimum(whole, short)
    # Waiting is not part of the launch, although devices wait for one element as well.
    launch[PHASES.index("wait")] = 0
    seconds = dict(zip(PHASES, (whole - launch).tolist(), strict=True))
    return Profile(**seconds, launch=float(launch.sum()))


class _Chain:
    """The phases of an all-reduce as programs, with its vector and codec states."""

    def __init__(self, mesh: Mesh, case: Case) -> None:
        self._whole = CompiledAllReduce(mesh, case)
        self._states, own = self._whole.states, P(self._whole.axis)
        self._programs = []
        for number, phase in enumerate(self._phases(mesh)):

            def link(carry: Any, number: int = number) -> Any:
                return phases(self._whole.stages())[number].run(carry)

            program = jax.jit(on_mesh(link, mesh, (own,), own), donate_argnums=0)
            self._programs.append((phase, program))
        # The programs donate what they are given, and the summands are used in every
        # run.
        self._copy = jax.jit(functools.partial(jax.tree.map, jnp.copy))

    def __call__(self, barrier: Callable[[], None]) -> list[float]:
        taken = dict.fromkeys(PHASES, 0.0)
        carry = jax.block_until_ready(self._copy((self._whole.summands, self._states)))
        barrier()
        # All devices have met once, so this is the time of a barrier itself.
        meeting = _seconds(barrier)
        for phase, program in self._programs:
            if phase in ("first", "second"):
                taken["wait"] += max(0.0, _seconds(barrier) - meeting)
            start = time.perf_counter()
            carry = jax.block_until_ready(program(carry))
            taken[phase] += time.perf_counter() - start
        _, self._states = carry
        return list(taken.values())

    def _phases(self, mesh: Mesh) -> list[str]:
        found: list[str] = []

        def local() -> None:
            found.extend(phase.name for phase in phases(self._whole.stages()))

        jax.eval_shape(on_mesh(local, mesh, (), P()))
        return found


def _seconds(function: Callable[[], None]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
