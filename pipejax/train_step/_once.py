"""Checks that a train step makes once, in the first step that needs them."""

import dataclasses
from typing import Any

import jax
import numpy as np

from pipejax._core.executors import StepConfig, join
from pipejax._core.message import Message, mark_of
from pipejax._core.step import Inputs
from pipejax._internal.mesh import inner_axes, processes_of_groups
from pipejax._internal.types import Tree

from ._one_program import check_same_batch
from ._replicate import check_same, check_same_in_groups, check_same_inside


@dataclasses.dataclass
class Checked:
    """The checks that have been made, and need not be made again.

    Attributes:
      forms: Forms of parameters and optimizer states that fit the optimizer.
      shared: Whether processes have compared what their losses share.
      batch: Whether processes have compared the form of a batch.
      rows: Whether processes of a group have compared their rows of a batch.
      empty: The queue that a warm-up was found to have without a valid message.
      marks: The marks of the batches of earlier steps.
    """

    forms: set[Any] = dataclasses.field(default_factory=set)
    shared: bool = False
    batch: bool = False
    rows: bool = False
    empty: tuple[Message, ...] = ()
    marks: set[np.uint32] = dataclasses.field(default_factory=set)

    def is_new(self, batch: Tree) -> bool:
        """Returns whether no earlier step has had a batch of this form; notes it."""
        mark = mark_of(batch)
        new = mark not in self.marks
        self.marks.add(mark)
        return new


def compare_once(inputs: Inputs, config: StepConfig, checked: Checked) -> None:
    """Raises a `ValueError` if inputs differ that must be the same.

    The form of a batch is compared between processes in the first step. What losses
    share is compared between processes and groups in the first step that has any. Rows
    of a batch that are not split inside a group are the same on all its devices, but
    each of its processes gives its own copy of them.
    """
    several = config.mesh.is_multi_process
    if several and not checked.batch and _holds_arrays(inputs.batch):
        join()  # Only one thread may launch collectives.
        check_same_batch(inputs.batch)
        checked.batch = True
    if not checked.shared and _holds_arrays(inputs.shared):
        _compare_shared(inputs.shared, config)
        checked.shared = True
    if not checked.rows and inputs.specs.batch:  # a traced batch has none
        _compare_rows(inputs, config)
        checked.rows = True


def _holds_arrays(tree: Tree) -> bool:
    leaves = jax.tree.leaves(tree)
    return bool(leaves) and not any(isinstance(x, jax.core.Tracer) for x in leaves)


def _compare_shared(shared: Tree, config: StepConfig) -> None:
    join()  # Only one thread may launch collectives.
    named = {"shared": shared}
    if config.mesh.is_multi_process:
        check_same(named, "train.step")
    if inner_axes(config.mesh, config.axis_name):
        check_same_in_groups(named, config)


def _compare_rows(inputs: Inputs, config: StepConfig) -> None:
    if any(len(x) > 1 for x in processes_of_groups(config.mesh, config.axis_name)):
        join()  # Only one thread may launch collectives.
        check_same_inside(inputs.batch, inputs.specs.batch, config)
