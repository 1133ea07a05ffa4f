"""The model of a `--model` option: its train step, its size and its compute."""

import statistics
from typing import Any, NamedTuple

import jax
import optax

import pipejax as pj
from pipejax.overlap import Measurement

from ._program import load, types
from ._usage import UsageError


class Program(NamedTuple):
    """A train step with a state and a batch to run it on."""

    train: pj.TrainStep
    state: pj.PipelineState
    batch: Any


class Model(NamedTuple):
    """The size and the compute of a model's step.

    Attributes:
      elements: The number of elements of its gradient.
      compute: Milliseconds that the step takes without an exchange.
      batch: The number of examples that a device takes in the step, if it is known.
    """

    elements: int
    compute: float
    batch: int | None = None

    @classmethod
    def of(cls, program: Program, times: Measurement) -> "Model":
        """Returns the size and the measured compute of a program's step."""
        return cls(
            optax.tree.size(program.state.params),
            1e3 * statistics.median(times.compute),
            len(jax.tree.leaves(program.batch)[0]) // program.train.config.devices,
        )

    def __str__(self) -> str:
        """Returns the arguments with which `pipejax plan` plans for this model."""
        batch = "" if self.batch is None else f" --batch {self.batch}"
        return f"--parameters {self.elements} --compute-ms {self.compute:.3f}{batch}"


def given(name: str, mesh: jax.sharding.Mesh) -> Program:
    """Calls the function that is called `name` with a mesh, and checks its result.

    Raises:
      UsageError: If the function returns anything but (train, state, batch) with
        arrays.
    """
    returned = load(name)(mesh)
    match returned:
        case (pj.TrainStep(), pj.PipelineState() as state, batch):
            leaves = jax.tree.leaves((state, batch))
            if not any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
                return Program(*returned)
    raise UsageError(
        f"{name} must return (train, state, batch) with a pj.TrainStep and arrays, got"
        f" {types(returned)}"
    )
