"""Encodes vectors, and writes scales as bytes."""

import jax
import numpy as np


def encoded(codec, x):
    """Returns the payload of x, and the vector decoded from it."""
    x = np.asarray(x, np.float32)
    state = codec.init(x.size, np.uint32(0))
    payload, _ = jax.jit(codec.encode)(x, state)
    decoded = jax.jit(codec.decode, static_argnums=1)(payload, x.size)
    return np.asarray(payload), np.asarray(decoded)


def scales(*values):
    """Returns the bytes of float32 scales, the least significant byte first."""
    return np.array(values, "<f4").tobytes()
