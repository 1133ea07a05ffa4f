"""Sets of arrays, each of which is summed by one collective.

Every collective costs a latency, and joining arrays into one vector costs a pass over
memory. Long arrays therefore travel alone, while short ones may travel as one vector.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pipejax._internal.ravel import ravel, unravel


class Combined(NamedTuple):
    """Sets of arrays. One collective sends all arrays of a set."""

    forms: tuple[jax.ShapeDtypeStruct, ...]  # of all arrays
    members: tuple[tuple[int, ...], ...]  # positions of the arrays of each set

    @classmethod
    def of(cls, forms: Sequence[jax.ShapeDtypeStruct], threshold: int) -> "Combined":
        """Combines the arrays that are shorter than `threshold` bytes by dtype."""
        groups: dict[tuple[str, int], list[int]] = {}
        for i, form in enumerate(forms):
            if not size(form):
                continue
            # The key 0 is shared by all short arrays of a dtype, and `i + 1` is no
            # other array's.
            alone = i + 1 if size(form) >= threshold else 0
            groups.setdefault((form.dtype.name, alone), []).append(i)
        return cls(tuple(forms), tuple(map(tuple, groups.values())))

    @property
    def bytes(self) -> tuple[int, ...]:
        return tuple(sum(size(self.forms[i]) for i in group) for group in self.members)

    def combine(self, arrays: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """Returns one array per set: its only array, or its arrays as one vector."""
        return tuple(
            arrays[group[0]] if len(group) == 1 else ravel([arrays[i] for i in group])
            for group in self.members
        )

    def separate(self, sent: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """Undoes `combine`: returns all arrays in the order of `forms`."""
        arrays = {
            i: jnp.zeros(form.shape, form.dtype)
            for i, form in enumerate(self.forms)
            if not size(form)
        }
        for group, x in zip(self.members, sent, strict=True):
            forms = [self.forms[i] for i in group]
            own = (x,) if len(group) == 1 else unravel(x, forms)
            arrays.update(zip(group, own, strict=True))
        return tuple(arrays[i] for i in range(len(self.forms)))


def size(form: jax.ShapeDtypeStruct) -> int:
    return math.prod(form.shape) * form.dtype.itemsize
