"""Checks the inputs of a step, and lays them out on the mesh."""

from pipejax._core.checks import check_batch
from pipejax._core.executors import StepConfig
from pipejax._core.step import Inputs, InputSpecs
from pipejax._internal.types import Tree

from ._feed import check_global, laid_out, plain_batch
from ._once import Checked, compare_once
from ._shared import check_overwritten, shared_on_mesh


def step_inputs(
    config: StepConfig, checked: Checked, state: Tree, batch: Tree, shared: Tree
) -> Inputs:
    """Returns the inputs of a step that runs, which are compared once."""
    check_overwritten(shared, state, donate=config.donate)
    batch = plain_batch(batch)
    check_global(batch, config.mesh)
    inputs = _on_mesh(config, batch, shared)
    compare_once(inputs, config, checked)
    return inputs


def example_inputs(config: StepConfig, batch: Tree, shared: Tree) -> Inputs | None:
    """Returns the inputs that show the form of a state, if a batch is given."""
    return None if batch is None else inputs_on_mesh(config, batch, shared)


def inputs_on_mesh(config: StepConfig, batch: Tree, shared: Tree) -> Inputs:
    """Returns a batch, and what all devices share, as they lie on the mesh."""
    return _on_mesh(config, plain_batch(batch), shared)


def _on_mesh(config: StepConfig, batch: Tree, shared: Tree) -> Inputs:
    check_batch(batch, config.devices, config.step.settings.microbatches)
    batch, of_batch = laid_out(batch, config)
    shared, of_shared = shared_on_mesh(shared, config)
    return Inputs(batch, shared, InputSpecs(of_batch, of_shared))
