"""A check at run time: does a step take the longer of compute and communication?"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.experimental import multihost_utils

from pipejax.collectives import AllReduce, Layout, Stages
from pipejax.executors import make_reduce
from pipejax.mesh import AxisName
from pipejax.train_step import PipelineState, TrainStep


class Measurement(NamedTuple):
    """Seconds a step, round by round; in each round all three run in turn.

    Attributes:
      compute: of a step that communicates nothing: forward, backward, update.
      communication: of the reduction of one step's gradients, alone.
      step: of the step itself.
    """

    compute: tuple[float, ...]
    communication: tuple[float, ...]
    step: tuple[float, ...]

    @property
    def ratio(self) -> tuple[float, ...]:
        """`step / max(compute, communication)`: 1 if the shorter is hidden whole."""
        rounds = zip(*self, strict=True)
        return tuple(step / max(rest) for *rest, step in rounds)

    @property
    def ceiling(self) -> tuple[float, ...]:
        """The ratio of a step that hides nothing, 2 where both are equally long."""
        return tuple(
            (a + b) / max(a, b)
            for a, b in zip(self.compute, self.communication, strict=True)
        )

    def __str__(self) -> str:
        rows = [
            f"{name:<14}{_ms(values)} ms"
            for name, values in zip(self._fields, self, strict=True)
        ]
        low, middle, high = _quartiles(self.ratio)
        ceiling = statistics.median(self.ceiling)
        return "\n".join(
            [
                f"{'':<14}{'median':>9}  (quartiles), {len(self.step)} rounds",
                *rows,
                f"step / max(compute, communication): {middle:.2f}"
                f" ({low:.2f} - {high:.2f}), floor 1.00, nothing hidden {ceiling:.2f}",
            ]
        )


def measure(
    train: TrainStep,
    state: PipelineState,
    batch: Any,
    *,
    rounds: int = 10,
    steps: int = 5,
) -> Measurement:
    """Times compute alone, communication alone, and the step, in turn.

    The floor of a step is the longer of the two, its ceiling their sum. Only a ratio
    within one measurement means anything on a machine that is shared. In a run of
    several processes, all must call it.

    Args:
      train: a train step.
      state: from `train.init` or `train.step`; it is left as it is.
      batch: a batch.
      rounds: how often to time all three, at least 2.
      steps: how many steps to time at once, at least 1.

    Returns:
      A `Measurement`: print it.

    Raises:
      ValueError: for fewer rounds or steps; as `train.step`.
    """
    if rounds < 2 or steps < 1:
        raise ValueError(
            "`rounds` must be at least 2, for a spread, and `steps` at least 1; got"
            f" {rounds=}, {steps=}."
        )
    train, silent = (
        _with(train, donate=False),
        _with(train, all_reduce=NoCommunication()),
    )
    state, _ = jax.block_until_ready(train.drain(state))
    runs: dict[str, Callable[[], float]] = {
        "compute": lambda: _time(silent, state, batch, steps),
        "communication": _communication(train, state, batch, steps),
        "step": lambda: _time(train, state, batch, steps),
    }
    for run in runs.values():
        run()  # compile
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            # Nobody is to wait, in a reduction, for who is still at the one before.
            multihost_utils.sync_global_devices("pipejax.overlap.measure")
            times[name].append(run())
    return Measurement(**{name: tuple(values) for name, values in times.items()})


def _time(train: TrainStep, state: PipelineState, batch: Any, steps: int) -> float:
    for _ in range(train.width - 1):  # as many in flight as in a long run
        state, _ = train.step(state, batch)
    jax.block_until_ready(state)
    start = time.perf_counter()
    for _ in range(steps):
        state, _ = train.step(state, batch)
    jax.block_until_ready(state)
    seconds = (time.perf_counter() - start) / steps
    jax.block_until_ready(train.drain(state))  # nothing of it runs on beside the next
    return seconds


def _communication(
    train: TrainStep, state: PipelineState, batch: Any, steps: int
) -> Callable[[], float]:
    """The reduction alone, of zeros in the form of one step's gradients."""
    like = _with(train, width=2).init(
        state.params, model_state=state.model_state, rng=state.rng, batch=batch
    )
    (message,) = like.in_flight.pending
    states = state.in_flight.codec_states
    reduce = make_reduce(train.config, train.executor.reduction_mesh)

    def run() -> float:
        start = time.perf_counter()
        for _ in range(steps):
            reduce(message, states)
        return (time.perf_counter() - start) / steps

    return run


def _with(train: TrainStep, **changes: Any) -> TrainStep:
    """Returns the step as it runs past warm-up and schedule, with these changes."""
    config = dataclasses.replace(train.config, **{"donate": False} | changes)
    last = dataclasses.replace(
        train.schedule, phases=train.schedule.phases[-1:], boundaries=()
    )
    return dataclasses.replace(train, config=config, schedule=last, warmup_steps=0)


class NoCommunication(AllReduce):
    """An all-reduce that sends nothing: each device keeps its own."""

    def __call__(self, layout: Layout, axis_name: AxisName) -> Stages:
        """Nothing."""
        del layout, axis_name
        return Stages(())


def _quartiles(values: tuple[float, ...]) -> list[float]:
    return statistics.quantiles(values, n=4)


def _ms(values: tuple[float, ...]) -> str:
    low, middle, high = (1e3 * value for value in _quartiles(values))
    return f"{middle:9.2f}  ({low:.2f} - {high:.2f})"
