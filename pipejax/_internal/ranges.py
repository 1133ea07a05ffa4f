"""Keeps sums within the range of a dtype that is narrower than float32.

float16 ends at 65,504. A sum over devices can exceed this although the mean is far
below it. A summand is therefore divided by `headroom(devices)` before it travels, and
the sum is multiplied by it afterwards, in float32. The headroom is a power of two, so
that only magnitudes below the smallest normal number of the dtype lose bits.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike


def is_narrow(dtype: DTypeLike) -> bool:
    """Returns whether the largest number is far below that of float32."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return False
    return bool(jnp.finfo(dtype).maxexp < jnp.finfo(jnp.float32).maxexp)


def sum_dtype(dtype: DTypeLike) -> np.dtype:
    """Returns the dtype of a sum over devices: float32 if `dtype` is narrow."""
    return np.dtype("float32") if is_narrow(dtype) else jnp.dtype(dtype)


def headroom(devices: int) -> float:
    """Returns the smallest power of two that is not below the number of devices."""
    return 2.0 ** (devices - 1).bit_length()


def scaled_down(x: jax.Array, devices: int) -> jax.Array:
    """Returns the summand that travels: `x / headroom(devices)` if `x` is narrow."""
    return x / headroom(devices) if is_narrow(x.dtype) else x


def scaled_up(total: jax.Array, devices: int) -> jax.Array:
    """Undoes `scaled_down` on the sum over devices, in `sum_dtype`."""
    if not is_narrow(total.dtype):
        return total
    return total.astype(jnp.float32) * headroom(devices)
