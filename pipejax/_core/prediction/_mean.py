"""The mean gradient that was applied last, from which devices predict."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from pipejax._internal.types import Leaf


class Mean(NamedTuple):
    """The mean gradient that was applied last.

    Attributes:
      gradients: The mean gradient, in a dtype of at most the size of the parameters'
        and with zeros in place of what is not finite.
        `None` if predictions with a sharded optimizer do not need it.
      loss: float32, the mean loss of the same batches.
      known: bool, whether an update has been applied at all. Until then, all are zero.
    """

    gradients: optax.Updates
    loss: jax.Array
    known: jax.Array

    @classmethod
    def empty(cls, params: optax.Params, travels: DTypeLike | None) -> "Mean":
        """Returns a mean before any update."""

        def zeros(leaf: Leaf) -> jax.Array:
            dtype = jnp.dtype(travels or leaf.dtype)
            smaller = dtype.itemsize < leaf.dtype.itemsize
            return jnp.zeros(leaf.shape, dtype if smaller else leaf.dtype)

        gradients = jax.tree.map(zeros, params)
        return cls(gradients, jnp.zeros((), jnp.float32), jnp.array(False))

    def after(self, gradients: optax.Updates, loss: jax.Array) -> "Mean":
        """Returns the mean after an update, without gradients that it does not keep."""

        def one(old: jax.Array | None, g: jax.Array | None) -> jax.Array | None:
            if old is None or g is None:
                return old
            # An optimizer may deal with NaN itself. P times NaN would be NaN. Keeping
            # the old value instead would cost one more read of the model.
            new = g.astype(old.dtype)
            return jnp.where(jnp.isfinite(new), new, 0)

        kept = self.gradients
        if kept is not None:
            kept = jax.tree.map(one, kept, gradients, is_leaf=lambda x: x is None)
        finite = jnp.where(jnp.isfinite(loss), loss.astype(jnp.float32), self.loss)
        return Mean(kept, finite, jnp.array(True))
