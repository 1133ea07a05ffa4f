"""Measures how much of a step's communication its compute hides."""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.experimental import multihost_utils

from pipejax._internal.integers import is_integer
from pipejax.train_step import LocalState, LocalTrainStep, PipelineState, TrainStep

from ._timed_parts import TimedParts, parts_of, parts_of_rounds


class Measurement(NamedTuple):
    """Seconds per step of compute alone, communication alone, and the whole step.

    Each attribute has one number for each round. The three numbers of a round were
    measured one after another. `print(measurement)` prints medians and quartiles.

    Attributes:
      compute: Seconds of a step that exchanges nothing: forward pass, backward pass and
        update, with the mean inside hosts that predictions may need.
      communication: Seconds of exchanging one message, with nothing else running. For
        local steps, seconds of exchanging and applying one chunk.
      step: Seconds of the whole step. A local step has a chunk beside it.

    Examples:
      Compute takes 2 s, communication 1 s, and the step 2.5 s. Half of the
      communication is hidden:

      >>> measurement = Measurement(compute=(2.0,), communication=(1.0,), step=(2.5,))
      >>> measurement.ratio, measurement.ceiling
      ((1.25,), (1.5,))
    """

    compute: tuple[float, ...]
    communication: tuple[float, ...]
    step: tuple[float, ...]

    @property
    def ratio(self) -> tuple[float, ...]:
        r"""Returns the step time over the longer of its two parts, for each round.

        $$ratio = step / \max(compute, communication)$$

        It is 1 if the shorter part is hidden completely, and `ceiling` if nothing is
        hidden.
        """
        rounds = zip(*self, strict=True)
        return tuple(step / max(rest) for *rest, step in rounds)

    @property
    def ceiling(self) -> tuple[float, ...]:
        r"""Returns the ratio of a step that hides nothing, for each round.

        $$ceiling = (compute + communication) / \max(compute, communication)$$

        It is 2 if both parts take the same time, and close to 1 if they differ much.
        """
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
    train: TrainStep | LocalTrainStep,
    state: PipelineState | LocalState,
    batch: Any,
    shared: Any = None,
    *,
    rounds: int = 10,
    steps: int = 5,
) -> Measurement:
    r"""Returns the seconds of compute, of communication, and of the whole step.

    The step takes the longer of the two times if the shorter one is hidden completely,
    and their sum if nothing is hidden:

    $$\max(compute, communication) \le step \le compute + communication$$

    Each round times all three, one after another. On a machine that is shared, only
    ratios of times from the same measurement are meaningful. The step is timed with a
    full pipeline, as it runs after its warm-up, and with the last algorithm of a
    `pj.collectives.Schedule`. All processes must call `measure`.

    The whole step of `pj.make_local_step` is one with a chunk beside it. Other steps of
    a round take as long as the compute. With `overlap_steps=0`, the whole step is the
    last one of a round, which the exchange of all parameters follows.

    Args:
      train: The train step, from `pj.make_train_step` or `pj.make_local_step`.
      state: A state that `train.init` or `train.step` has returned. `measure` does not
        change it, even if `train` donates its states.
      batch: A batch, as for `train.step`.
      shared: As for `train.step`.
      rounds: Number of rounds, at least 2.
      steps: Number of steps that are timed together in each round, at least 1.

    Raises:
      ValueError: If `rounds` or `steps` breaks its rule, or if `train.step` does not
        accept the state or the batch.
    """
    if not (is_integer(rounds, 2) and is_integer(steps, 1)):
        raise ValueError(
            "`rounds` must be an integer of at least 2, because quartiles need two"
            f" values, and `steps` one of at least 1; got {rounds=}, {steps=}."
        )
    given: Any = state
    if isinstance(train, LocalTrainStep):
        parts = parts_of_rounds(train, given, steps)
    else:
        parts = parts_of(train, given, batch, shared)
    timed = parts.fills, batch, shared, steps
    runs: dict[str, Callable[[], float]] = {
        "compute": lambda: _time(parts.alone, parts.silent, *timed),
        "communication": lambda: _time_exchange(parts, steps),
        "step": lambda: _time(parts.whole, parts.state, *timed),
    }
    for run in runs.values():
        run()  # compiles the programs
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            # Otherwise the time of a reduction would include the wait for a process
            # that has not finished the run before.
            multihost_utils.sync_global_devices("pipejax.overlap.measure")
            times[name].append(run())
    return Measurement(**{name: tuple(values) for name, values in times.items()})


def _time(
    train: Any, state: Any, fills: int, batch: Any, shared: Any, steps: int
) -> float:
    for _ in range(fills):
        state, _ = train.step(state, batch, shared)
    jax.block_until_ready(state)
    start = time.perf_counter()
    for _ in range(steps):
        state, _ = train.step(state, batch, shared)
    jax.block_until_ready(state)
    seconds = (time.perf_counter() - start) / steps
    # No reduction of this run may still be in progress when the next run begins.
    jax.block_until_ready(train.drain(state))
    return seconds


def _time_exchange(parts: TimedParts, steps: int) -> float:
    start = time.perf_counter()
    for _ in range(steps):
        jax.block_until_ready(parts.exchange())
    return (time.perf_counter() - start) / steps


def _quartiles(values: tuple[float, ...]) -> list[float]:
    return statistics.quantiles(values, n=4, method="inclusive")


def _ms(values: tuple[float, ...]) -> str:
    low, middle, high = (1e3 * value for value in _quartiles(values))
    return f"{middle:9.2f}  ({low:.2f} - {high:.2f})"
