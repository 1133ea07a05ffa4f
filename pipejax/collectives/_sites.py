"""Where an algorithm encodes: a codec, its state, and what stays exact beside it."""

import dataclasses
import functools
import operator
import zlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pipejax.bits import from_words, to_words
from pipejax.codecs import Codec
from pipejax.mesh import AxisName

from ._layout import Layout, Summands
from ._stages import States


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Parts:
    """A vector or a piece of one, in its layout's `working_dtype`.

    Attributes:
      coded: [..., h], what may be compressed.
      exact: [..., t], what may not.
    """

    coded: jax.Array
    exact: jax.Array

    def __add__(self, other: "Parts") -> "Parts":
        return Parts(self.coded + other.coded, self.exact + other.exact)


class Cut(NamedTuple):
    """Arrays as a vector cut into equal pieces, zeros at the end of the last.

    Attributes:
      layout: of the arrays.
      pieces: how many.
      coded: elements of a piece that may be compressed, h.
      exact: elements of a piece that may not, t.
    """

    layout: Layout
    pieces: int
    coded: int
    exact: int

    @classmethod
    def of(cls, layout: Layout, pieces: int, multiple: int) -> "Cut":
        """Pieces whose coded part is a multiple of what the codec takes."""
        blocks = max(1, -(-layout.coded_size // (pieces * multiple)))
        exact = -(-layout.exact_size // pieces)
        return cls(layout, pieces, multiple * blocks, exact)

    def rows(self, summands: Summands) -> Parts:
        """Returns the arrays as pieces: [pieces, h] and [pieces, t]."""
        coded, exact = self.layout.vectors(summands)
        return Parts(self._padded(coded, self.coded), self._padded(exact, self.exact))

    def arrays(self, rows: Parts) -> Summands:
        """Undoes `rows`."""
        coded = rows.coded.reshape(-1)[: self.layout.coded_size]
        exact = rows.exact.reshape(-1)[: self.layout.exact_size]
        return self.layout.arrays(coded, exact)

    def site(
        self, name: str, codec: Codec, axis_name: AxisName, rows: int | None = None
    ) -> "Site":
        """A place at which pieces are encoded, or so many rows of them at once."""
        return Site(
            name=name,
            codec=codec.of(dtype=self.layout.working_dtype),
            dtype=self.layout.working_dtype,
            coded=self.coded,
            exact=self.exact,
            axis_name=axis_name,
            drawing=self.layout.drawing or axis_name,
            rows=rows,
        )

    def _padded(self, x: jax.Array, length: int) -> jax.Array:
        x = jnp.pad(x, (0, self.pieces * length - x.size))
        return x.reshape(self.pieces, length)


class Site(NamedTuple):
    """One place of an algorithm at which vectors of one length are encoded.

    Attributes:
      name: of its state.
      codec: for the coded part.
      dtype: in which vectors are summed.
      coded: h, elements that it codes.
      exact: t, elements beside them.
      axis_name: of those that exchange.
      drawing: axes whose devices have random numbers of their own.
      rows: how many vectors at once, each with its own state; `None` for one.
    """

    name: str
    codec: Codec
    dtype: np.dtype
    coded: int
    exact: int
    axis_name: AxisName
    drawing: AxisName
    rows: int | None = None

    @property
    def bytes(self) -> int:
        """Of one payload; for several, of all."""
        exact = self.dtype.itemsize * self.exact
        return (self.rows or 1) * (self.codec.size(self.coded) + exact)

    def init(self) -> States:
        """Its state by its name, or nothing if it has none."""
        rank = lax.axis_index(self.drawing).astype(jnp.uint32)
        place = jnp.uint32(zlib.crc32(f"{self.axis_name} {self.name}".encode()))
        seed = place ^ (rank * jnp.uint32(2654435761))  # Knuth's multiplicative hash
        state = self._init(seed)
        return {self.name: state} if jax.tree.leaves(state) else {}

    def encode(
        self, parts: Parts, states: States, where: Any = None
    ) -> tuple[jax.Array, States]:
        """The payload: unsigned integers [words], or [rows, words].

        Args:
          parts: what to send.
          states: of all sites.
          where: bool scalar, whether this device really sends; else its state stays.
        """
        state = states.get(self.name, ())
        check_kept(self.name, state, self._init)
        encode = self._encode if self.rows is None else jax.vmap(self._encode)
        payload, new = encode(parts, state)
        if not jax.tree.leaves(new):
            return payload, states
        if where is not None:
            new = jax.tree.map(lambda n, o: jnp.where(where, n, o), new, state)
        return payload, {**states, self.name: new}

    def decode(self, payload: jax.Array) -> Parts:
        """What was sent: one payload, or several along the first axis."""
        return self._decode(payload) if payload.ndim == 1 else self._many(payload)

    def decoded_sum(self, payloads: Iterable[jax.Array]) -> Parts:
        """The sum of what several devices sent, in their order."""
        # One by one, so that decoding and adding are one loop. With JAX 0.10, XLA:CPU
        # takes 60 times as long for the sum over the first axis of a matrix.
        return functools.reduce(operator.add, map(self.decode, payloads))

    def _init(self, seed: jax.Array) -> Any:
        if self.rows is None:
            return self.codec.init(self.coded, seed)
        rows = jnp.arange(self.rows, dtype=jnp.uint32) * jnp.uint32(40503)
        return jax.vmap(lambda row: self.codec.init(self.coded, seed ^ row))(rows)

    def _many(self, payloads: jax.Array) -> Parts:
        return jax.vmap(self._decode)(payloads)

    def _encode(self, parts: Parts, state: Any) -> tuple[jax.Array, Any]:
        payload, state = self.codec.encode(parts.coded, state)
        if self.exact:
            payload = jnp.concatenate([payload, to_words(parts.exact, payload.dtype)])
        return payload, state

    def _decode(self, payload: jax.Array) -> Parts:
        split = self.codec.size(self.coded) // payload.dtype.itemsize
        coded = self.codec.decode(payload[:split], self.coded).astype(self.dtype)
        if not self.exact:
            return Parts(coded, jnp.zeros(0, self.dtype))
        return Parts(coded, from_words(payload[split:], self.dtype))


def check_kept(name: str, state: Any, init: Callable[[jax.Array], Any]) -> None:
    """A ValueError unless the state is one that the codec here would have made."""
    wanted = jax.eval_shape(init, jax.ShapeDtypeStruct((), jnp.uint32))
    if not jax.tree.leaves(wanted) and not jax.tree.leaves(state):
        return
    if _form(state) != _form(wanted):
        raise ValueError(
            f"`state` must hold what the codec at {name!r} keeps, {_form(wanted)[1]};"
            f" got {_form(state)[1]}, of another all-reduce, codec or number of"
            " devices. Drain it with what made it, then go on from `init`."
        )


def _form(state: Any) -> tuple[Any, list[tuple[int, ...]]]:
    return jax.tree.structure(state), [leaf.shape for leaf in jax.tree.leaves(state)]
