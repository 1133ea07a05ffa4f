"""A function of whole arrays, run on pieces of them.

The function is traced at the shapes of the whole arrays. Every device then runs its
equations on its pieces, by the rules of `_rules`. Where the function sums over a split
axis of an array, devices add the sums of their pieces. These sums divide the
program into levels: a level runs without communication, and one small all-reduce
follows each level but the last.

The functions that run this way are updates of Optax optimizers: a moment at a place
follows from the gradient, the parameter and the moment at this place. Clipping by the
global norm needs one sum, and so do all other decisions that depend on whole gradients,
such as whether they are finite.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from pipejax._internal.jaxpr import value_of
from pipejax._internal.types import Tree

from ._rules import Split


class Operation(NamedTuple):
    """An operation on this device's pieces."""

    reads: tuple[Any, ...]
    writes: tuple[Any, ...]
    run: Callable[..., Sequence[Any]]


@dataclasses.dataclass(eq=False)
class Level:
    """Operations that run without communication, and the sums that follow them.

    Attributes:
      sums: Names of the arrays that are then added over devices.
      forms: Shapes and dtypes of these arrays.
    """

    operations: list[Operation] = dataclasses.field(default_factory=list)
    sums: list[Any] = dataclasses.field(default_factory=list)
    forms: list[jax.ShapeDtypeStruct] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A function of whole arrays as a program for pieces; see `on_partitions`.

    Between levels, the value of the program is a list of arrays: those that later
    levels read or that the function returns.

    Attributes:
      handed: Names of the arrays of the value before each level, and of the results.
      results: Names or constants of the results, leaf by leaf.
    """

    levels: tuple[Level, ...]
    handed: tuple[tuple[Any, ...], ...]
    results: tuple[Any, ...]
    splits: tuple[Split, ...]
    tree: Tree

    def run(self, level: int, value: list[Any]) -> list[Any]:
        """Runs a level, and hands on its sums first, followed by what others need."""
        env = dict(zip(self.handed[level], value, strict=True))
        for operation in self.levels[level].operations:
            operands = (value_of(env, name) for name in operation.reads)
            env.update(zip(operation.writes, operation.run(*operands), strict=True))
        return [env[name] for name in self.handed[level + 1]]

    def sums(self, level: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns shapes and dtypes of the arrays that devices add after a level."""
        return tuple(self.levels[level].forms)

    def result(self, value: list[Any]) -> Any:
        """Returns the result of the function, from the value after the last level."""
        env = dict(zip(self.handed[-1], value, strict=True))
        return jax.tree.unflatten(
            self.tree, [value_of(env, name) for name in self.results]
        )
