"""Finds what weight prediction needs of an optimizer whose state is sharded.

The owners of the state find where the parameters go if the gradients in flight are zero
(`coasted`). Every device keeps what it needs to add the part of its own gradients
(`Needs`). See `_piecewise_step` for the equations.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from pipejax.pieces import Coarse, CoarseForm, not_affine
from pipejax.shards import Shards, on_shards

from ._places import Places, spec_leaves
from ._update import select, updated


class Needs(NamedTuple):
    """The parts of parameters and optimizer state that a prediction uses.

    Attributes:
      params: Whether the update is not affine in the parameters.
      leaves: Numbers of the leaves of the optimizer state that are split over the data
        and in which the update is not affine.
      coarse: The form of the coarse copies of these leaves.
      inside: How these leaves are split over inner axes.
    """

    params: bool
    leaves: tuple[int, ...]
    coarse: CoarseForm
    inside: tuple[P, ...]

    @classmethod
    def of(
        cls, tx: optax.GradientTransformation, params: Any, places: Places
    ) -> "Needs":
        """Returns what a prediction must know.

        An update is run twice for a prediction, with a gradient and without one. What
        it is affine in cancels, up to products with the gradient.

        Args:
          tx: The optimizer.
          params: Shapes of the whole parameters.
          places: Where the pieces lie.
        """

        def update(params: Any, opt_state: Any, gradients: Any, loss: Any) -> Any:
            return updated(tx, gradients, opt_state, params, loss)

        loss = jax.ShapeDtypeStruct((), jnp.float32)
        whole, cuts = places.whole_opt_state, places.opt_state_cuts
        bent = not_affine(update, params, whole, params, loss)
        count = len(jax.tree.leaves(params))
        leaves = tuple(
            i
            for i, (cut, other) in enumerate(zip(cuts, bent[count:], strict=False))
            if other and cut is not None and places.data > 1
        )
        forms, specs = jax.tree.leaves(whole), spec_leaves(places.opt_state)
        inside = spec_leaves(places.opt_state_inside)
        coarse = CoarseForm(
            pieces=tuple(places.piece(forms[i], specs[i]) for i in leaves),
            cuts=tuple(cuts[i] or 0 for i in leaves),
            devices=places.data,
        )
        return cls(any(bent[:count]), leaves, coarse, tuple(inside[i] for i in leaves))

    def chosen(self, opt_state: Any) -> tuple[Any, ...]:
        """Returns the leaves of an optimizer state of which devices have copies."""
        leaves = jax.tree.leaves(opt_state)
        return tuple(leaves[i] for i in self.leaves)

    def copied(self, opt_state: Any, shards: Shards) -> Coarse | None:
        """Returns the coarse copies of a whole optimizer state, or `None` without any.

        Args:
          opt_state: The whole state.
          shards: How a group shards its arrays.
        """
        if not self.leaves:
            return None
        copies = self.coarse.of
        if shards:
            copies = on_shards(copies, (self.inside,), coarse_specs(shards))
        return copies(self.chosen(opt_state))

    def known(
        self, opt_state: Any, coarse: Coarse | None, places: Places, shards: Shards
    ) -> Any:
        """Returns the whole optimizer state, as far as a device needs to know it.

        Arrays that are not split over the data are known. Coarse copies stand in for
        those that matter, and zeros for the others.

        Args:
          opt_state: This device's pieces.
          coarse: The coarse copies, or `None`.
          places: Where the pieces lie.
          shards: How a group shards its arrays.
        """
        copies: dict[int, jax.Array] = {}
        if coarse is not None:
            arrays = self.coarse.arrays
            if shards:
                arrays = on_shards(arrays, (coarse_specs(shards),), self.inside)
            copies = dict(zip(self.leaves, arrays(coarse), strict=True))
        forms, structure = jax.tree.flatten(places.whole_opt_state)
        found = []
        for i, own in enumerate(jax.tree.leaves(opt_state)):
            if places.opt_state_cuts[i] is None or places.data == 1:
                found.append(own)
            else:
                zeros = jnp.zeros(forms[i].shape, forms[i].dtype)
                found.append(copies.get(i, zeros))
        return jax.tree.unflatten(structure, found)


def coarse_specs(shards: Shards) -> Coarse:
    """Returns how coarse copies are split over inner axes.

    Args:
      shards: How a group shards its arrays.
    """
    return Coarse(P(shards.inner), P())


def coasted(
    tx: optax.GradientTransformation,
    params: Any,
    opt_state: Any,
    loss: jax.Array,
    behind: Sequence[jax.Array],
) -> Any:
    """Returns the parameters after an update by zero for each message in flight.

    Args:
      tx: The optimizer.
      params: Parameters.
      opt_state: Optimizer state.
      loss: The last loss, for optimizers that take it as `value`.
      behind: For each message in flight, whether it is real.
    """
    zeros = jax.tree.map(jnp.zeros_like, params)
    for real in behind:
        updates, new = updated(tx, zeros, opt_state, params, loss)
        moved = optax.apply_updates(params, updates)
        params, opt_state = select(real, (moved, new), (params, opt_state))
    return params
