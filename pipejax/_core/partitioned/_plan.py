"""Makes a program for pieces from a function of whole arrays.

The equations of the traced function are added in order. Each goes to the first level
that has all of its operands, and an equation that sums over pieces ends a level.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pipejax._internal.jaxpr import Constant, Equation, inlined, name_of, runner
from pipejax._internal.types import ClosedJaxpr, JaxprEqn, Tree

from ._program import Level, Operation, Program
from ._rules import (
    Devices,
    NotElementwiseError,
    Rule,
    Split,
    acts_elementwise,
    is_elementwise,
    is_split,
    on_elements,
    rule_of,
    whole,
)


def on_partitions(
    function: Callable[..., Any],
    args: Sequence[Any],
    splits: Sequence[Split],
    devices: Devices,
) -> Program:
    """Returns a function of whole arrays as a program for pieces of them."""
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
    return _of(closed, splits, devices, jax.tree.structure(shape))


def _of(
    closed: ClosedJaxpr, splits: Sequence[Split], devices: Devices, tree: Tree
) -> Program:
    """Returns a traced function as a program for pieces."""
    planner = _Planner(devices)
    inputs = tuple(object() for _ in closed.jaxpr.invars)
    for name, split in zip(inputs, splits, strict=True):
        planner.known[name] = devices.divides(split), 0
    results = tuple(map(planner.made, planner.inline(closed, inputs)))
    out_splits = tuple(planner.located(name)[0] for name in results)
    levels = tuple(planner.levels)
    handed = _handed(inputs, levels, results)
    return Program(levels, handed, results, out_splits, tree)


class _Planner:
    """Collects the operations of a program.

    Attributes:
      known: How each array is split, and the first level that can read it, by name.
      uniform: Arrays whose elements are all the same, such as the zeros that stand for
        a gradient: the name of the number, and the shape. What is computed from them
        element by element is uniform too. They are made only where an operation needs
        them, in the size that it needs.
    """

    def __init__(self, devices: Devices) -> None:
        self.devices = devices
        self.levels = [Level()]
        self.known: dict[Any, tuple[Split, int]] = {}
        self.uniform: dict[Any, tuple[Any, tuple[int, ...]]] = {}

    def inline(self, closed: ClosedJaxpr, args: Sequence[Any]) -> tuple[Any, ...]:
        """Adds all operations of a traced function, and returns its results."""
        names = dict(zip(closed.jaxpr.invars, args, strict=True))
        found: dict[Any, Any] = {}  # names of the traced function to names of `self`
        for each in inlined(closed, names):
            reads = tuple(found.get(name, name) for name in each.reads)
            results = self.add(each, reads)
            found.update(zip(each.writes, results, strict=True))
        outs = (name_of(names, v) for v in closed.jaxpr.outvars)
        return tuple(found.get(name, name) for name in outs)

    def located(self, name: Any) -> tuple[Split, int]:
        """Returns how an array or a constant is split, and the level that has it."""
        if isinstance(name, Constant):
            return whole(jnp.ndim(name.value)), 0
        return self.known[name]

    def add(self, found: Equation, reads: tuple[Any, ...]) -> tuple[Any, ...]:
        """Adds the operation of an equation, and returns the names of its results."""
        equation = found.equation
        if equation.primitive.name == "reshard":
            return reads  # Pieces lie where they are, whatever an array's sharding is.
        located = list(map(self.located, reads))
        splits = [split for split, _ in located]
        # The first level in which all operands are there.
        level = max((level for _, level in located), default=0)
        # In place of uniform arrays, element-wise operations read the numbers that fill
        # them: the zeros of a frozen parameter then cost no memory in the shape of the
        # parameter.
        numbers = tuple(self.uniform.get(name, (name,))[0] for name in reads)
        if _is_uniform(equation):
            return self._uniform(level, numbers, equation.outvars)
        if _keeps_equal(equation) and self._are_uniform(reads):
            scalars = (whole(0),) * len(equation.outvars)
            run = functools.partial(on_elements, equation)
            made = self._add(level, numbers, run, scalars)
            return self._uniform(level, made, equation.outvars)
        # Element by element, a number broadcasts against pieces. Any other operation
        # needs the array.
        elementwise = is_elementwise(equation, splits)
        reads = numbers if elementwise else tuple(map(self.made, reads))
        if not any(map(is_split, splits)):
            # Every device has all operands, and does as is done with whole arrays.
            results = tuple(whole(var.aval.ndim) for var in equation.outvars)
            return self._add(level, reads, runner(found), results)
        if equation.primitive.name != "cond":
            rule = rule_of(equation, splits, self.devices)
            return self._add_rule(level, reads, rule)
        branches = _branches(equation, splits, self.devices)
        if any(len(branch.levels) > 1 for branch in branches):
            return self._all_branches(equation, reads)
        return self._add_rule(level, reads, _condition(branches, self.devices))

    def _add_rule(
        self, level: int, reads: tuple[Any, ...], rule: Rule
    ) -> tuple[Any, ...]:
        """Adds an operation on pieces, and the sum over devices that it may need.

        The operation leaves this device's part of a sum. The sum ends the level, and
        what needs it is in the next one.
        """
        results = self._add(level, reads, rule.run, rule.splits)
        if rule.sent is None:
            return results
        if level + 1 == len(self.levels):
            self.levels.append(Level())
        self.levels[level].sums += results
        self.levels[level].forms.append(rule.sent)
        return self._add(level + 1, results, lambda x: [rule.finish(x)], rule.splits)

    def _all_branches(
        self, equation: JaxprEqn, reads: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """Adds all branches of a `lax.cond`, and a choice between their results.

        This is for branches that sum over devices. Sums end levels, and there is no
        level inside a branch.
        """
        which, *operands = reads
        branches = equation.params["branches"]
        # All branches run, and their sums share levels: no device waits in a branch
        # that another device does not take.
        cases = zip(*(self.inline(each, operands) for each in branches), strict=True)
        chosen: list[Any] = []
        for variable, names in zip(equation.outvars, cases, strict=True):
            form = jax.ShapeDtypeStruct(variable.aval.shape, variable.aval.dtype)
            index = jax.ShapeDtypeStruct((), jnp.int32)
            select = jax.make_jaxpr(lax.select_n)(index, *[form] * len(names))
            chosen += self.inline(select, (which, *names))
        return tuple(chosen)

    def made(self, name: Any) -> Any:
        """Returns the name of a whole array, which is made if it is uniform."""
        if name not in self.uniform:
            return name
        number, shape = self.uniform[name]
        run = lambda x: [jnp.broadcast_to(x, shape)]  # noqa: E731
        _, level = self.known[name]
        (made,) = self._add(level, (number,), run, (whole(len(shape)),))
        return made

    def _are_uniform(self, names: tuple[Any, ...]) -> bool:
        """Returns whether some arrays are uniform, and all others are numbers."""
        numbers = (self.located(name)[0] == () for name in names)
        uniform = [name in self.uniform for name in names]
        return any(uniform) and all(map(operator.or_, uniform, numbers))

    def _uniform(
        self, level: int, numbers: tuple[Any, ...], results: Sequence[Any]
    ) -> tuple[Any, ...]:
        """Returns new names for uniform arrays, in the shapes of some results."""
        names = tuple(object() for _ in results)
        for name, number, result in zip(names, numbers, results, strict=True):
            self.known[name] = whole(result.aval.ndim), level
            self.uniform[name] = number, result.aval.shape
        return names

    def _add(
        self,
        level: int,
        reads: tuple[Any, ...],
        run: Callable[..., Sequence[Any]],
        splits: tuple[Split, ...],
    ) -> tuple[Any, ...]:
        writes = tuple(object() for _ in splits)
        self.levels[level].operations.append(Operation(reads, writes, run))
        self.known.update((n, (s, level)) for n, s in zip(writes, splits, strict=True))
        return writes


def _is_uniform(equation: JaxprEqn) -> bool:
    if equation.primitive.name != "broadcast_in_dim":
        return False
    return len(equation.invars) == 1 and not equation.invars[0].aval.ndim


def _keeps_equal(equation: JaxprEqn) -> bool:
    """Returns whether an operation makes equal elements from equal elements.

    It then does to numbers what it does to arrays of one shape. Some bitcasts change
    the shape.
    """
    operands = [var.aval.shape for var in equation.invars if var.aval.ndim]
    shapes = {*operands, *(var.aval.shape for var in equation.outvars)}
    return acts_elementwise(equation) and len(shapes) == 1


def _branches(
    equation: JaxprEqn, splits: Sequence[Split], devices: Devices
) -> list[Program]:
    if is_split(splits[0]):
        raise NotElementwiseError("cond on a split predicate")
    return [
        _of(branch, splits[1:], devices, jax.tree.structure(list(branch.out_avals)))
        for branch in equation.params["branches"]
    ]


def _condition(branches: Sequence[Program], devices: Devices) -> Rule:
    """Returns the rule of a `lax.cond` whose branches work on pieces."""
    # The branches do not sum over devices, because a level has no communication.
    joint: list[Split] = []
    for found in zip(*(branch.splits for branch in branches), strict=True):
        # A whole result in one branch is cut like the split result of another.
        kinds = {split for split in found if is_split(split)} or {found[0]}
        if len(kinds) > 1:
            raise NotElementwiseError("cond of arrays split apart")
        joint += kinds

    def in_branch(branch: Program) -> Callable[..., list[Any]]:
        def run(*values: Any) -> list[Any]:
            results = branch.result(branch.run(0, list(values)))
            triples = zip(results, branch.splits, joint, strict=True)
            return [
                x if had == wanted else devices.piece(jnp.asarray(x), wanted)
                for x, had, wanted in triples
            ]

        return run

    def run(index: Any, *values: Any) -> Sequence[Any]:
        return lax.switch(index, [in_branch(branch) for branch in branches], *values)

    return Rule(run, tuple(joint))


def _handed(
    inputs: tuple[Any, ...], levels: tuple[Level, ...], results: tuple[Any, ...]
) -> tuple[tuple[Any, ...], ...]:
    """Returns the names of what is handed on before each level, and to the results."""
    written: list[Any] = [*inputs]
    handed = [inputs]
    for number, level in enumerate(levels):
        for operation in level.operations:
            written += operation.writes
        wanted = {
            n
            for later in levels[number + 1 :]
            for o in later.operations
            for n in o.reads
        }
        wanted |= {name for name in results if not isinstance(name, Constant)}
        summed = set(level.sums)
        # The sums come first, because a collective stands between two levels and
        # replaces them alone.
        others = [n for n in dict.fromkeys(written) if n in wanted and n not in summed]
        handed.append((*level.sums, *others))
    return tuple(handed)
