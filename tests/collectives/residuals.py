"""Adds up what codecs with error feedback owe."""

import jax
import numpy as np


def pieces(place, device):
    """Returns the pieces of the vector that a device encodes at `place`, by row."""
    name, _, number = place.partition(" ")
    if name == "hop":
        return lambda p: [(device - int(number) - 1) % p]
    if name in ("gather", "owner"):
        return lambda p: [device]
    if name == "halve":  # the half that the partner keeps
        d = int(number)
        return lambda p: [(device ^ d) & -d | k for k in range(d)]
    return lambda p: range(p)  # all pieces in scatter and fold, or the only one


def owed(states, n, devices, cuts):
    """Returns the sum of the residuals over devices and places, as one vector.

    The vector has n elements, and is cut into so many pieces.
    """
    total = np.zeros(n)
    for place, state in states.items():
        (residual,) = jax.tree.leaves(state.residual)
        for device, own in enumerate(np.asarray(residual).reshape(devices, -1)):
            parts = list(pieces(place, device)(cuts))
            whole = np.zeros((cuts, own.size // len(parts)))
            whole[parts] = own.reshape(len(parts), -1)
            total += whole.reshape(-1)[:n]
    return total
