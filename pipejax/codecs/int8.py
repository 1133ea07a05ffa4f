"""Block-wise 8-bit integers: `q = round(127 x / s)`, `s` the block's largest magnitude.

A payload is bytes: the integers, then a float32 scale per block. Decoded,
`|x - q s / 127| <= s / 254`; a block with NaN or infinity decodes to nothing finite.
"""

import jax
import jax.numpy as jnp
from jax import lax

BLOCK = 256  # elements; 4 bytes of scale on 256 of payload


def size(n: int) -> int:
    """Bytes of the payload of n elements."""
    return n + 4 * (n // BLOCK)


def encode(x: jax.Array) -> jax.Array:
    """Floating [n], n a multiple of `BLOCK`, to uint8 [size(n)]."""
    blocks = x.astype(jnp.float32).reshape(-1, BLOCK)
    scale = jnp.max(jnp.abs(blocks), axis=1, keepdims=True)
    unit = jnp.where(scale > 0, scale, 1.0)
    integers = jnp.round(127 * (blocks / unit)).astype(jnp.int8)
    return jnp.concatenate(
        [
            lax.bitcast_convert_type(integers, jnp.uint8).reshape(-1),
            lax.bitcast_convert_type(scale, jnp.uint8).reshape(-1),
        ]
    )


def decode(payload: jax.Array) -> jax.Array:
    """uint8 [size(n)] to float32 [n]."""
    n = payload.size * BLOCK // (BLOCK + 4)
    integers = lax.bitcast_convert_type(payload[:n], jnp.int8).reshape(-1, BLOCK)
    scale = lax.bitcast_convert_type(payload[n:].reshape(-1, 4), jnp.float32)
    # In this order a scale of infinity or NaN reaches every element: 0 x inf is NaN.
    return (integers.astype(jnp.float32) * (scale[:, None] / 127)).reshape(-1)
