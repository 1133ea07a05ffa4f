"""The model of a `--model` option: its train step, its size and its compute."""

import dataclasses
import statistics
from typing import Any, NamedTuple

import jax

import pipejax as pj
from pipejax import timing
from pipejax._core.message import at_width_1
from pipejax._internal.mesh import size_along
from pipejax._internal.shards import split_axes
from pipejax.overlap import Measurement

from ._program import load, types
from ._usage import UsageError


class RunnableStep(NamedTuple):
    train: pj.TrainStep | pj.LocalTrainStep
    state: pj.PipelineState | pj.LocalState
    batch: Any
    shared: Any = None


class Model(NamedTuple):
    """A model and its times.

    Attributes:
      elements: The number of elements of its gradient.
      compute: Milliseconds of a synchronous step without an exchange.
      batch: The number of examples of a device, if known.
      ahead: Milliseconds that a step of width 2 computes in addition, for predictions.
      averages_inside: Whether these have a mean inside hosts.
    """

    elements: int
    compute: float
    batch: int | None = None
    ahead: float = 0.0
    averages_inside: bool = False

    @classmethod
    def of(
        cls, step: RunnableStep, times: Measurement, twin: Measurement | None = None
    ) -> "Model":
        """Returns a model from the times of its step and of the synchronous twin."""
        train, seconds = step.train, statistics.median(times.compute)
        compute = seconds if twin is None else statistics.median(twin.compute)
        averages, ahead = False, 0.0
        if isinstance(train, pj.TrainStep) and train.settings.weight_prediction:
            averages = train.settings.device_axis is not None
            ahead = (seconds - compute) / max(1, train.width - 1)
        return cls(
            elements=elements(step.state),
            compute=1e3 * compute,
            batch=examples(train, step.batch),
            ahead=1e3 * max(0.0, ahead),
            averages_inside=averages,
        )

    def times(self, cluster: timing.Cluster) -> timing.Compute:
        """Returns the times of a step, whose update a prediction repeats."""
        update = 1e-3 * self.ahead
        if self.averages_inside:
            update -= timing.mean_inside_hosts(cluster, self.elements)
        compute = 1e-3 * self.compute
        update = min(max(0.0, update), compute)
        return timing.Compute.of(compute - update, update)

    def __str__(self) -> str:
        """Returns the arguments with which `pipejax plan` plans for this model."""
        return flags(self.elements, f"{self.compute:.3f}", self.batch)


def twin_of(program: RunnableStep) -> RunnableStep | None:
    """Returns the synchronous twin, which predicts nothing, or `None` without one."""
    train, state, batch, shared = program
    if not isinstance(state, pj.PipelineState) or not isinstance(train, pj.TrainStep):
        return None
    if train.width == 1:
        return None
    plain = dataclasses.replace(train.plain, earlier=(), boundaries=())
    drained, _ = train.drain(state)
    alone = drained._replace(in_flight=at_width_1(drained.in_flight))
    return RunnableStep(plain, alone, batch, shared)


def measured_twin(program: RunnableStep, rounds: int) -> Measurement | None:
    """Times the synchronous twin, if there is one."""
    twin = twin_of(program)
    return twin and pj.overlap.measure(*twin, rounds=rounds, steps=1)


def elements(state: pj.PipelineState | pj.LocalState) -> int:
    # optax.tree.size warns of jax.ShapeDtypeStructs.
    return sum(x.size for x in jax.tree.leaves(state.params))


def examples(train: pj.TrainStep | pj.LocalTrainStep, batch: Any) -> int:
    """Returns the number of examples that a device, or a group, takes in a step."""
    return len(jax.tree.leaves(batch)[0]) // size_along(train.mesh, train.axis_name)


def flags(elements: int, compute: str, batch: int | None) -> str:
    also = "" if batch is None else f" --batch {batch}"
    return f"--parameters {elements} --compute-ms {compute}{also}"


def spread(train: pj.TrainStep | pj.LocalTrainStep, state: Any) -> str:
    """Returns the flags of `pipejax plan` for how devices share a model and a step."""
    rounds = isinstance(state, pj.LocalState)
    own = state.local if rounds else state
    split = any(split_axes(spec, train.mesh.shape) for spec in own.shards.params)
    flags = {
        "--sharded": split,
        "--shard-optimizer": not rounds and own.trainable.gathered is not None,
        "--local-steps": rounds,
    }
    return "".join(f" {flag}" for flag, holds in flags.items() if holds)


def load_step(name: str, mesh: jax.sharding.Mesh) -> RunnableStep:
    returned = load(name)(mesh)
    match returned:
        case (pj.TrainStep(), pj.PipelineState(), _, *shared) | (
            pj.LocalTrainStep(),
            pj.LocalState(),
            _,
            *shared,
        ) if len(shared) < 2:
            leaves = jax.tree.leaves(returned[1:])
            if not any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
                return RunnableStep(*returned)
    raise UsageError(
        f"{name} must return (train, state, batch) with a train step or local step, and"
        f" arrays; got {types(returned)}"
    )
