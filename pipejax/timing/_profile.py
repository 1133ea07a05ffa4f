"""An all-reduce taken apart: where its time goes, measured.

Its links run one by one, each a program of its own, and before each collective the
devices meet at a barrier: the time there is spent on waiting for others, the time after
it on the wire. What the same links take of a vector of one element is neither: it is
the launch of programs and messages.
"""

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

from pipejax.collectives import phases, psum
from pipejax.mesh import on_mesh

from ._stopwatch import Case, Program, check_several


class Profile(NamedTuple):
    """Seconds of an all-reduce by what they are spent on, means over processes.

    Attributes:
      encode: making what is sent.
      wait: for other devices, before each collective.
      first: exchange: the reduce-scatter, or up a tree; all of `psum`.
      reduction: decoding what came and adding it.
      second: exchange: the all-gather, or down a tree.
      decode: making the vector from what came last.
      launch: programs and messages, however short.
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
        """All of it; as one program it may take less."""
        return sum(self)


PHASES = Profile._fields[:-1]


def profile(mesh: Mesh, cases: Mapping[str, Case], rounds: int) -> dict[str, Profile]:
    """Takes each all-reduce apart; in a run of several processes, all must call this.

    Args:
      mesh: over all of whose axes is summed.
      cases: what to take apart, by name.
      rounds: how often; in each all run in turn, and medians count.

    Raises:
      ValueError: for a mesh of one device, which exchanges nothing.
    """
    check_several(mesh)
    barrier = Program(mesh, Case(psum(), 1))
    chains = {
        name: (_Chain(mesh, case), _Chain(mesh, case._replace(elements=1)))
        for name, case in cases.items()
    }
    runs: dict[str, list[Any]] = {name: [] for name in cases}
    for number in range(rounds + 1):
        for name, pair in chains.items():
            times = [chain(barrier) for chain in pair]
            if number:  # the first has compiled
                runs[name].append(times)
    return {name: _profile(np.array(times)) for name, times in runs.items()}


def _profile(times: np.ndarray) -> Profile:
    """Of [rounds, long and short, phases] on this process."""
    every = multihost_utils.process_allgather(times).reshape(-1, *times.shape)
    whole, short = np.median(every.mean(axis=0), axis=0)
    launch = np.minimum(whole, short)
    launch[PHASES.index("wait")] = 0  # of a short one as much
    seconds = dict(zip(PHASES, (whole - launch).tolist(), strict=True))
    return Profile(**seconds, launch=float(launch.sum()))


class _Chain:
    """The links of an all-reduce as programs, with a vector and the codecs' states."""

    def __init__(self, mesh: Mesh, case: Case) -> None:
        self._whole = Program(mesh, case)
        self._states, own = self._whole.states, P(self._whole.axis)
        self._programs = []
        for number, phase in enumerate(self._phases(mesh)):

            def link(carry: Any, number: int = number) -> Any:
                return phases(self._whole.stages())[number].run(carry)

            program = jax.jit(on_mesh(link, mesh, (own,), own), donate_argnums=0)
            self._programs.append((phase, program))
        self._copy = jax.jit(functools.partial(jax.tree.map, jnp.copy))

    def __call__(self, barrier: Callable[[], None]) -> list[float]:
        """Seconds of each phase on this process."""
        taken = dict.fromkeys(PHASES, 0.0)
        carry = jax.block_until_ready(self._copy((self._whole.summands, self._states)))
        barrier()
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
