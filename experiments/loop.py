"""The steps of a run: between restoring and draining."""

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
    """When what happens, in steps.

    Attributes:
      steps: in all.
      log_every: between lines of the log.
      test_every: between tests; the one at the end is the caller's, after the drain.
      checkpoint_every: between checkpoints; 0 saves only at the end.
    """

    steps: int
    log_every: int
    test_every: int
    checkpoint_every: int

    def saves_at(self, step: int) -> bool:
        """Whether a checkpoint is due."""
        every = self.checkpoint_every
        return step == self.steps or (every > 0 and step % every == 0)


class Outcome(NamedTuple):
    """How the loop ended.

    Attributes:
      state: after the last step, in-flight gradients and all.
      terminated: whether a SIGTERM ended it; the state is then saved.
      steps_per_second: compilation, tests and checkpoints left out.
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
    """Steps until the end of the schedule or a SIGTERM, with a progress bar."""
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
    """Whether SIGTERM has come, asked between steps; the handler is put back after."""

    def __enter__(self) -> Callable[[], bool]:
        self._come = False
        self._before = signal.signal(signal.SIGTERM, self._note)
        return lambda: self._come

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def _note(self, *_: object) -> None:
        self._come = True


class Clock:
    """Steps a second, compilation, tests and checkpoints left out."""

    def __init__(self, skip: int = 5) -> None:
        self._steps, self._seconds, self._last, self._skip = 0, 0.0, 0.0, skip

    def tick(self) -> None:
        """One step has been dispatched."""
        now = time.perf_counter()
        if self._skip > 0:
            self._skip -= 1
        else:
            self._steps += 1
            self._seconds += now - self._last
        self._last = now

    def rate(self) -> float:
        """Steps a second so far; 0 before there are any."""
        return self._steps / self._seconds if self._steps else 0.0

    def paused(self) -> "Clock":
        """A context whose time does not count."""
        return self

    def __enter__(self) -> None:
        self._paused = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._last += time.perf_counter() - self._paused
