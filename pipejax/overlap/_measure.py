"""Measures how much of a step's communication its compute hides."""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.experimental import multihost_utils

from pipejax._core.executors import make_exchange
from pipejax._core.message import valid_in_step
from pipejax.collectives import NoCommunication
from pipejax.train_step import PipelineState, TrainStep


class Measurement(NamedTuple):
    """Seconds per step of compute alone, communication alone, and the whole step.

    Each attribute has one number for each round. The three numbers of a round were
    measured one after another. `print(measurement)` prints medians and quartiles.

    Attributes:
      compute: Seconds of a step that communicates nothing: forward pass, backward pass
        and update.
      communication: Seconds of exchanging one message, with nothing else running.
      step: Seconds of the whole step.

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
    train: TrainStep,
    state: PipelineState,
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

    Args:
      train: The train step.
      state: A state that `train.init` or `train.step` has returned. `measure` does not
        change it, even if `train` donates its states.
      batch: A batch, as for `train.step`.
      shared: As for `train.step`.
      rounds: Number of rounds, at least 2.
      steps: Number of steps that are timed together in each round, at least 1.

    Raises:
      ValueError: If `rounds` or `steps` is too small, or if `train.step` does not
        accept the state or the batch.
    """
    if rounds < 2 or steps < 1:
        raise ValueError(
            "`rounds` must be at least 2, because quartiles need two values, and"
            f" `steps` must be at least 1; got {rounds=}, {steps=}."
        )
    train, silent = (
        _with(train, donate=False),
        _with(train, all_reduce=NoCommunication()),
    )
    state, _ = jax.block_until_ready(train.drain(state))
    runs: dict[str, Callable[[], float]] = {
        "compute": lambda: _time(silent, state, batch, shared, steps),
        "communication": _communication(train, state, batch, shared, steps),
        "step": lambda: _time(train, state, batch, shared, steps),
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
    train: TrainStep, state: PipelineState, batch: Any, shared: Any, steps: int
) -> float:
    for _ in range(train.width - 1):  # fills the pipeline
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


def _communication(
    train: TrainStep, state: PipelineState, batch: Any, shared: Any, steps: int
) -> Callable[[], float]:
    """Returns a function that times the exchange of one message, which holds zeros."""
    like = _with(train, width=2).init(
        state.params,
        model_state=state.model_state,
        rng=state.rng,
        batch=batch,
        shared=shared,
    )
    (message,) = like.in_flight.pending
    exchange = make_exchange(train.config, train.executor.reduction_mesh)
    # The exchange of a sharded optimizer updates each device's pieces in between.
    trained = state.trainable if train.config.step.shards_optimizer else None
    valid = valid_in_step(train.width - 1, train.width - 1)
    args = trained, message, state.in_flight.codec_states, valid

    def run() -> float:
        start = time.perf_counter()
        for _ in range(steps):
            exchange(*args)
        return (time.perf_counter() - start) / steps

    return run


def _with(train: TrainStep, **changes: Any) -> TrainStep:
    """Returns `train` without warm-up and in its last phase, with these changes."""
    config = dataclasses.replace(train.config, **{"donate": False} | changes)
    return dataclasses.replace(train, config=config, earlier=(), boundaries=())


def _quartiles(values: tuple[float, ...]) -> list[float]:
    return statistics.quantiles(values, n=4)


def _ms(values: tuple[float, ...]) -> str:
    low, middle, high = (1e3 * value for value in _quartiles(values))
    return f"{middle:9.2f}  ({low:.2f} - {high:.2f})"
