"""Names for pytrees and their leaves, which have no types of their own."""

from typing import Any

Tree = Any
"""A pytree of arrays, or of their shapes and dtypes."""
Leaf = Any
"""An array, a number, or the shape and dtype of an array."""
ModelState = Any
"""A pytree of arrays that a loss function changes without a gradient, or `None`."""
Keys = Any
"""A PRNG key, or a pytree of keys, or `None`."""
Specs = Any
"""A pytree of partition specs. It may be a prefix of the pytree that it describes."""
CodecStates = Any
"""The states of an all-reduce's codecs, such as residuals, by the name of the codec's
place in the algorithm."""
JaxprEqn = Any
"""An equation of a jaxpr. JAX's own type does not know the shapes of its values."""
ClosedJaxpr = Any
"""A traced program. JAX's own type is slow to import."""
