"""Sites: the places in an algorithm where vectors are encoded."""

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

from pipejax._internal.bits import from_words, to_words
from pipejax._internal.mesh import AxisName, axis_size
from pipejax.codecs import Codec

from ._layout import Layout, Summands
from ._stages import Local, Stages, States


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Parts:
    """A vector or a piece of one, in the `working_dtype` of its layout."""

    coded: jax.Array  # elements that a codec may compress, [..., h]
    exact: jax.Array  # elements that stay exact, [..., t]

    def __add__(self, other: "Parts") -> "Parts":
        return Parts(self.coded + other.coded, self.exact + other.exact)


class Cut(NamedTuple):
    """How a vector of arrays is cut into equal pieces, padded with zeros at its end."""

    layout: Layout
    pieces: int
    coded: int  # h, the elements of a piece that a codec may compress
    exact: int  # t, the elements of a piece that stay exact

    @classmethod
    def of(cls, layout: Layout, pieces: int, multiple: int) -> "Cut":
        """Returns a cut into pieces whose coded length is a multiple of `multiple`."""
        # There is at least one block, so that no codec has to encode an empty vector.
        blocks = max(1, -(-layout.coded_size // (pieces * multiple)))
        exact = -(-layout.exact_size // pieces)
        return cls(layout, pieces, multiple * blocks, exact)

    def rows(self, summands: Summands) -> Parts:
        """Returns the arrays as padded pieces, [pieces, h] and [pieces, t]."""
        sizes = self.pieces * self.coded, self.pieces * self.exact
        coded, exact = self.layout.vectors(summands, sizes)
        return Parts(coded.reshape(self.pieces, -1), exact.reshape(self.pieces, -1))

    def arrays(self, rows: Parts) -> Summands:
        """Undoes `rows`: returns arrays of the layout, without the padding."""
        return self.layout.arrays(rows.coded.reshape(-1), rows.exact.reshape(-1))

    def site(
        self, name: str, codec: Codec, axis_name: AxisName, rows: int | None = None
    ) -> "Site":
        """Returns a site that encodes `rows` pieces at once; see `Site`."""
        over = self.layout.over or axis_name
        return Site(
            name=name,
            codec=codec.of(dtype=self.layout.working_dtype, devices=axis_size(over)),
            dtype=self.layout.working_dtype,
            coded=self.coded,
            exact=self.exact,
            axis_name=axis_name,
            drawn=self.layout.drawn or over,
            rows=rows,
        )


class Site(NamedTuple):
    """A place in an algorithm where vectors of one length are encoded.

    The payload also carries the elements that stay exact.
    """

    name: str  # also the key of the codec's state
    codec: Codec
    dtype: np.dtype
    coded: int  # h, the elements of a vector that the codec encodes
    exact: int  # t, the elements of a vector that stay exact
    axis_name: AxisName  # the devices that send the payload to each other
    drawn: AxisName  # the axes along which random numbers differ
    rows: int | None = None  # vectors encoded at once; `None` for one without an axis

    @property
    def bytes(self) -> int:
        """Returns the size of the payload in bytes, of all rows together."""
        exact = self.dtype.itemsize * self.exact
        return (self.rows or 1) * (self.codec.size(self.coded) + exact)

    def init(self, prefix: str) -> States:
        """Returns the codec's first state by the name of the site, or an empty dict.

        `prefix` will stand before the name.
        """
        rank = lax.axis_index(self.drawn).astype(jnp.uint32)
        name = f"{self.axis_name} {prefix}{self.name}"
        place = jnp.uint32(zlib.crc32(name.encode()))
        seed = place ^ (rank * jnp.uint32(2654435761))  # Knuth's multiplicative hash
        state = self._init(seed)
        return {self.name: state} if jax.tree.leaves(state) else {}

    @property
    def encoding(self) -> Stages:
        return Stages((Local(self.encode, encodes=True),), (self.init,))

    def encode(
        self, parts: Parts, states: States, where: Any = None
    ) -> tuple[jax.Array, States]:
        """Encodes one vector, [h] and [t], or `rows` of them, [rows, h] and [rows, t].

        Returns the payload, unsigned integers of shape [words] or [rows, words], and
        the states of all sites after it. If `where` is false, the device does not send
        the payload, and its state does not change.
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
        """Decodes one payload, [words], or several of them, [count, words]."""
        decode = self._decode if payload.ndim == 1 else jax.vmap(self._decode)
        return decode(payload)

    def decoded_sum(self, payloads: Iterable[jax.Array]) -> Parts:
        """Returns the sum of the decoded payloads, added up in their order."""
        # Payloads are added one by one, so that XLA decodes and adds in one loop. With
        # JAX 0.10, XLA:CPU takes 60 times as long to sum over the first axis of a
        # matrix.
        return functools.reduce(operator.add, map(self.decode, payloads))

    def _init(self, seed: jax.Array) -> Any:
        if self.rows is None:
            return self.codec.init(self.coded, seed)
        # Each row has a seed of its own: an odd factor maps different rows to different
        # seeds.
        rows = jnp.arange(self.rows, dtype=jnp.uint32) * jnp.uint32(40503)
        return jax.vmap(lambda row: self.codec.init(self.coded, seed ^ row))(rows)

    def _encode(self, parts: Parts, state: Any) -> tuple[jax.Array, Any]:
        """Encodes one vector. The exact elements follow the codec's payload."""
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
    """Raises a `ValueError` unless `state` has the form of what `init` returns."""
    wanted = jax.eval_shape(init, jax.ShapeDtypeStruct((), jnp.uint32))
    if not jax.tree.leaves(wanted) and not jax.tree.leaves(state):
        return
    if _form(state) != _form(wanted):
        raise ValueError(
            f"`state` must hold the arrays that the codec at {name!r} keeps, of shapes"
            f" {_form(wanted)[1]}; got {_form(state)[1]}, the state of another"
            " all-reduce, codec or number of devices. Drain it with the train step that"
            " made it, and continue from `init`."
        )


def _form(state: Any) -> tuple[Any, list[tuple[int, ...]]]:
    return jax.tree.structure(state), [leaf.shape for leaf in jax.tree.leaves(state)]
