"""The model of a `--model` option: its train step, its size and its compute."""

import statistics
from typing import Any, NamedTuple

import jax

import pipejax as pj
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
    elements: int  # of its gradient
    compute: float  # milliseconds of the step without an exchange
    batch: int | None = None  # examples of a device, if known

    @classmethod
    def of(cls, step: RunnableStep, times: Measurement) -> "Model":
        compute = 1e3 * statistics.median(times.compute)
        return cls(elements(step.state), compute, examples(step.train, step.batch))

    def __str__(self) -> str:
        """Returns the arguments with which `pipejax plan` plans for this model."""
        return flags(self.elements, f"{self.compute:.3f}", self.batch)


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
