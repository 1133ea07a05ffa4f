r"""Slopes in 8 bits, which the owners of an optimizer's state send to all devices.

A slope P within its bound b (see `_rule`) is sent as a number of four exponent bits and
three of mantissa, whose largest stands for b. Its error is at most a sixteenth, over 14
powers of two below b.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

CODE = jnp.float8_e4m3fn
_LARGEST = float(jnp.finfo(CODE).max)


class Slopes(NamedTuple):
    """The slopes of all parameters, as every device keeps them.

    Attributes:
      codes: For each gradient in flight a tree like the parameters.
      steepest: For each gradient in flight a tree of float32 scalars, the bounds.
    """

    codes: tuple[Any, ...]
    steepest: tuple[Any, ...]

    def decoded(self) -> tuple[Any, ...]:
        """Returns the slopes for each gradient in flight."""
        pairs = zip(self.codes, self.steepest, strict=True)
        return tuple(jax.tree.map(decoded, *pair) for pair in pairs)


def encoded(slope: jax.Array, steepest: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns the code of slopes, which `decoded` undoes.

    Examples:
      >>> code = encoded(jnp.float32([1.0, -0.3, 5.0]), jnp.float32(2.0), CODE)
      >>> decoded(code, jnp.float32(2.0)).tolist()
      [1.0, -0.2857142984867096, 2.0]
    """
    if dtype != CODE:
        return slope.astype(dtype)
    share = jnp.where(steepest > 0, slope.astype(jnp.float32) / steepest, 0)
    return (_LARGEST * jnp.clip(share, -1, 1)).astype(CODE)


def decoded(code: jax.Array, steepest: jax.Array) -> jax.Array:
    """Returns the slopes that a code stands for."""
    if code.dtype != CODE:
        return code
    return code.astype(jnp.float32) * (steepest / _LARGEST)


def to_words(code: jax.Array) -> jax.Array:
    """Returns 8-bit codes as integers, since backends may send floats as float32.

    Other arrays stay as they are.
    """
    is_code = code.dtype == CODE
    return lax.bitcast_convert_type(code, jnp.uint8) if is_code else code


def word_form(form: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype that `to_words` returns."""
    return form.update(dtype=jnp.uint8) if form.dtype == CODE else form


def of_words(words: jax.Array, like: jax.Array) -> jax.Array:
    """Undoes `to_words`."""
    same = words.dtype == like.dtype
    return words if same else lax.bitcast_convert_type(words, like.dtype)
