"""Runs the steps of a run, from the restored state up to the drain."""

import signal
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

import pipejax as pj
from pipejax import checkpoint

from . import logs


class Schedule(NamedTuple):
    """The steps at which a run logs, tests, saves and ends.

    Attributes:
      steps: Number of steps of the run, including those before it was resumed.
      log_every: Number of steps between lines of the log.
      test_every: Number of steps between tests. The caller runs the last test, after
        the drain.
      checkpoint_every: Number of steps between checkpoints. With 0, the run saves only
        at its end.
    """

    steps: int
    log_every: int
    test_every: int
    checkpoint_every: int

    def saves_at(self, step: int) -> bool:
        """Returns whether a checkpoint is due after this step."""
        every = self.checkpoint_every
        return step == self.steps or (every > 0 and step % every == 0)


class Outcome(NamedTuple):
    """The result of the loop.

    Attributes:
      state: State after the last step, including the gradients in flight.
      terminated: Whether a SIGTERM ended the loop. The state has then been saved.
      steps_per_second: Steps per second, without compilation, tests and checkpoints.
    """

    state: pj.PipelineState
    terminated: bool
    steps_per_second: float


def run(
    train: pj.TrainStep,
    state: pj.PipelineState,
    batches: Any,
    schedule: Schedule,
    *,
    test: Callable[[pj.PipelineState], dict[str, float]],
    manager: ocp.CheckpointManager,
    log: logs.Log,
    console: Console,
    label: str,
) -> Outcome:
    """Trains until the schedule ends or a SIGTERM comes, and shows a progress bar."""
    start = int(state.step)
    clock = Clock()
    with Terminated() as terminated, _progress(console) as progress:
        bar = progress.add_task(
            label, total=schedule.steps, completed=start, rate="", loss=""
        )
        for step in range(start + 1, schedule.steps + 1):
            state, info = train.step(state, next(batches))
            clock.tick()
            if step % schedule.log_every == 0:
                row = _scalars(info) | {"steps_per_second": clock.rate()}
                log.write(step, row)
                rate, loss = f"{clock.rate():.0f} steps/s", f"loss {row['loss']:.3f}"
                progress.update(bar, completed=step, rate=rate, loss=loss)
            with clock.paused():
                if step % schedule.test_every == 0 and step < schedule.steps:
                    log.write(step, test(state))
                if terminated() or schedule.saves_at(step):
                    _save(manager, state, batches)
            if terminated():
                manager.wait_until_finished()
                break
        jax.block_until_ready(state)
        return Outcome(state, terminated(), clock.rate())


def _save(
    manager: ocp.CheckpointManager, state: pj.PipelineState, batches: Any
) -> None:
    if manager.latest_step() != int(state.step):
        checkpoint.save(manager, state, batches.get_state())


def _scalars(info: pj.StepInfo) -> dict[str, float]:
    scalars = {"loss": info.loss, **info.metrics, "skipped": info.skipped}
    return {name: float(value) for name, value in scalars.items()}


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[loss]}"),
        console=console,
    )


class Terminated:
    """Context that catches SIGTERM, and restores the signal handler when it ends.

    The value of the context is a function that returns whether a SIGTERM has come. The
    loop calls this function between steps.
    """

    def __enter__(self) -> Callable[[], bool]:
        self._come = False
        self._before = signal.signal(signal.SIGTERM, self._note)
        return lambda: self._come

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def _note(self, *_: object) -> None:
        self._come = True


class Clock:
    """Measures steps per second, without compilation, tests and checkpoints.

    The first `skip` steps are not counted, because they include compilation.
    """

    def __init__(self, skip: int = 5) -> None:
        self._steps, self._seconds, self._last, self._skip = 0, 0.0, 0.0, skip

    def tick(self) -> None:
        """Notes that a step has been dispatched."""
        now = time.perf_counter()
        if self._skip > 0:
            self._skip -= 1
        else:
            self._steps += 1
            self._seconds += now - self._last
        self._last = now

    def rate(self) -> float:
        """Returns the steps per second so far, or 0 before any step is counted."""
        return self._steps / self._seconds if self._steps else 0.0

    def paused(self) -> "Clock":
        """Returns a context whose time does not count."""
        return self

    def __enter__(self) -> None:
        self._paused = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._last += time.perf_counter() - self._paused
