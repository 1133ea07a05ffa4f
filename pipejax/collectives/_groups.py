"""Which arrays share a collective.

A collective costs a latency, a copy into a vector costs a pass over memory: long arrays
travel alone, in their own shape, and short ones may travel together.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pipejax.vectors import apart, joined


class Groups(NamedTuple):
    """Arrays in groups, each of which is sent by one collective.

    Attributes:
      forms: shapes and dtypes of the arrays.
      members: for each group the positions of its arrays. Arrays without elements are
        in none of them.
    """

    forms: tuple[jax.ShapeDtypeStruct, ...]
    members: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, forms: Sequence[jax.ShapeDtypeStruct], together: int) -> "Groups":
        """Groups arrays that are shorter than `together` bytes by their dtypes.

        >>> form = jax.ShapeDtypeStruct((8,), "float32")
        >>> Groups.of([form, form], 0).members, Groups.of([form, form], 64).members
        (((0,), (1,)), ((0, 1),))
        """
        groups: dict[tuple[str, int], list[int]] = {}
        for i, form in enumerate(forms):
            if not size(form):
                continue
            alone = i + 1 if size(form) >= together else 0
            groups.setdefault((form.dtype.name, alone), []).append(i)
        return cls(tuple(forms), tuple(map(tuple, groups.values())))

    @property
    def bytes(self) -> tuple[int, ...]:
        """Returns what each group holds."""
        return tuple(sum(size(self.forms[i]) for i in group) for group in self.members)

    def together(self, arrays: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """Returns one array for each group."""
        return tuple(
            arrays[group[0]] if len(group) == 1 else joined([arrays[i] for i in group])
            for group in self.members
        )

    def separate(self, sent: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """Undoes `together`."""
        arrays = {
            i: jnp.zeros(form.shape, form.dtype)
            for i, form in enumerate(self.forms)
            if not size(form)
        }
        for group, x in zip(self.members, sent, strict=True):
            forms = [self.forms[i] for i in group]
            own = (x,) if len(group) == 1 else apart(x, forms)
            arrays.update(zip(group, own, strict=True))
        return tuple(arrays[i] for i in range(len(self.forms)))


def size(form: jax.ShapeDtypeStruct) -> int:
    """Returns the bytes of an array."""
    return math.prod(form.shape) * form.dtype.itemsize
