"""Checks the inputs of a step, and lays them out on the mesh."""

from pipejax._core.checks import check_batch
from pipejax._core.executors import StepConfig
from pipejax._core.step import Inputs, InputSpecs
from pipejax._internal.types import Tree

from ._feed import laid_out
from ._shared import shared_on_mesh


def inputs_on_mesh(config: StepConfig, batch: Tree, shared: Tree) -> Inputs:
    """Returns a batch, and what all devices share, as they lie on the mesh."""
    check_batch(batch, config.devices, config.step.settings.microbatches)
    batch, of_batch = laid_out(batch, config)
    shared, of_shared = shared_on_mesh(shared, config)
    return Inputs(batch, shared, InputSpecs(of_batch, of_shared))
