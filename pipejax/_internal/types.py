"""Names for pytrees and their leaves, which have no types of their own."""

from typing import Any

Tree = Any
"""A pytree of arrays, or of their shapes and dtypes."""
Leaf = Any
"""An array, a number, or the shape and dtype of an array."""
ModelState = Any
"""The pytree of what a loss function changes and no gradient is taken of, or `None`."""
Keys = Any
"""A PRNG key, or a pytree of keys, or `None`."""
Specs = Any
"""A pytree of partition specs, which may be a prefix of the pytree that it is for."""
CodecStates = Any
"""What the codecs of an all-reduce keep from one message to the next, by site."""
JaxprEqn = Any
"""An equation of a jaxpr. JAX's own type does not know the shapes of its values."""
ClosedJaxpr = Any
"""A traced program. JAX's own type is slow to import."""
