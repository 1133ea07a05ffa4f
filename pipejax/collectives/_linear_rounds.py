"""The rounds of a linear codec, each of which is a sum of vectors over devices."""

import dataclasses
import functools
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from pipejax._internal.ravel import ravel, unravel
from pipejax.codecs import Linear

from ._layout import Layout, Summands
from ._sites import check_kept
from ._stages import Local, Stages, States, local, on_first, renamed


class Carry(NamedTuple):
    """The value between two rounds of a linear codec."""

    leaves: Any  # the gradients as the codec takes them
    exact: jax.Array  # the exact vector, or its sum after the last round
    sums: tuple[jax.Array, ...] = ()  # of all rounds so far
    own: jax.Array | None = None  # this device's part of the last round


@dataclasses.dataclass(frozen=True)
class LinearRounds:
    codec: Linear
    layout: Layout
    total: Callable[[Layout], Stages]  # sums one coded and one exact vector

    def stages(self) -> Stages:
        dtype = self.layout.working_dtype
        sizes = self.codec.round_sizes(self.layout.coded_size)
        total = Stages((), (self.init,)) + local(self.begin)
        for number, size in enumerate(sizes):
            # The exact vector is short. It travels in the last round, and not in a
            # collective of its own.
            last = number == len(sizes) - 1
            exact = self.layout.exact_size if last else 0
            form = Layout.of_shapes(((size,),), dtype, exact=exact)
            form = form._replace(over=self.layout.over, drawn=self.layout.drawn)
            project = functools.partial(self.project, last=last)
            total += Stages((Local(project, encodes=True),))
            # A round may have codecs with states of their own.
            total += on_first(renamed(self.total(form), f"round {number} "))
            total += local(self.collect)
        return total + Stages((Local(self.finish),))

    def init(self, prefix: str) -> States:
        # The seed is the same on all devices, because payloads of different devices are
        # summed without being decoded.
        seed = jnp.uint32(zlib.crc32(f"{prefix}psum".encode()))
        return {"psum": self.codec.init(self.layout.coded_size, seed)}

    def begin(self, summands: Summands) -> Carry:
        dtype = self.layout.working_dtype
        arrays = tuple(x.astype(dtype) for x in summands.coded)
        leaves = arrays if self.codec.needs_leaves else ravel(arrays, dtype)
        return Carry(leaves, ravel(summands.exact, dtype))

    def project(self, carry: Carry, states: States, *, last: bool) -> tuple[Any, Any]:
        init = functools.partial(self.codec.init, self.layout.coded_size)
        check_kept("psum", states.get("psum", ()), init)
        # A round may depend on the sums of earlier rounds: PowerSGD needs the
        # orthonormal sum of its first round for the second. The state is the same in
        # all rounds.
        own = self.codec.project(carry.leaves, states["psum"], carry.sums)
        own = own.astype(self.layout.working_dtype)
        exact = (carry.exact,) if last and carry.exact.size else ()
        # Only the finish needs the `own` of a round, and only that of the last.
        return (
            Summands((own,), exact),
            carry._replace(own=own if last else None),
        ), states

    def collect(self, value: tuple[Summands, Carry]) -> Carry:
        sums, carry = value
        exact = sums.exact[0] if sums.exact else carry.exact
        return carry._replace(exact=exact, sums=(*carry.sums, *sums.coded))

    def finish(self, carry: Carry, states: States) -> tuple[Summands, States]:
        state, forms = states["psum"], self.layout.sums()
        total = self.codec.rebuild(state, carry.sums, self.layout.coded_size)
        # Error feedback needs `own`, to know what the codec has lost of this device's
        # gradient.
        own = cast(jax.Array, carry.own)
        new = self.codec.settled(carry.leaves, state, carry.sums, own)
        arrays = total if self.codec.needs_leaves else unravel(total, forms.coded)
        pairs = zip(arrays, forms.coded, strict=True)
        coded = tuple(x.astype(form.dtype).reshape(form.shape) for x, form in pairs)
        exact = unravel(carry.exact, forms.exact)
        return Summands(coded, exact), states | {"psum": new}
