"""Keeps XLA on CPUs from fusing operations that take longer in one loop than in two."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

Result = TypeVar("Result")


def unfused(function: Callable[..., Result], *args: Any) -> Result:
    """Returns `function(*args)`, which XLA on CPUs fuses with no other operation.

    Arithmetic that is fused with slices or concatenations becomes a loop that is not
    vectorized, or has a branch for each element, and takes up to ten times as long as
    two loops. Inside the function, operations are fused as usual.
    """

    def alone(*args: Any) -> Result:
        # XLA fuses nothing across the borders of a conditional. It keeps a conditional
        # if it can neither evaluate the predicate nor merge equal branches.
        always = lax.optimization_barrier(jnp.array(True))

        def never(*args: Any) -> Result:
            return function(*jax.tree.map(lambda x: x + x.dtype.type(1), args))

        return lax.cond(always, function, never, *args)

    return lax.platform_dependent(*args, cpu=alone, default=function)


def concatenated(pieces: list[jax.Array]) -> jax.Array:
    """Concatenates vectors. Unlike `jnp.concatenate`, it is fast on CPUs.

    XLA:CPU fuses a concatenation into a loop with a branch for each element. For 1 MB
    of an MLP's gradients, it takes 7 ms on two cores, where a copy takes 0.03 ms.
    """
    return unfused(lambda *pieces: jnp.concatenate(pieces), *pieces)
