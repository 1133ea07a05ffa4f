r"""Predicts the parameters to which the gradients in flight will lead.

Let w be the parameters, s the state of an optimizer, `U(g; s)` the change of the
parameters by its update, and m the mean gradient that was applied last. The mean that
is in flight is not known yet. A device knows two stand-ins: m, which is a step old, and
its own gradient, which is noisy. The linearized prediction of a device is

$$v = w + U(m; s) + P (g_{own} - m), P = \partial U / \partial g$$

at m, element by element. Over devices, the mean of `g_own` is the mean in flight, so
the mean of the predictions is right to first order for any optimizer, whereas that of
`U(g_own; s)` is not: noise enlarges Adam's second moment, and shortens every step.

For several gradients in flight, U is the change by K-1 updates in turn, and there is a
P for each of them. In special cases the prediction is `w + U(g_own; s)`, and nothing
needs m:

- U is linear in the gradients. Both predictions are then the same.
- There is only one device. Its gradient is the mean.

If an update mixes elements, as the matrix products of Muon do, P does not describe it.
The prediction is then `w + U(m + 0.5 (g_own - m); s)`.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from pipejax._internal.finite import SumOfSquares, sum_of_squares
from pipejax._internal.ravel import promoted
from pipejax._internal.sources import reads
from pipejax._internal.structures import select, with_zeros
from pipejax._internal.types import Tree

from ._expand import expanded, works_elementwise
from ._expansion import bounds_of, expansion, finite
from ._mean import Mean
from ._slopes import Slopes, encoded

Update = Callable[[Any, Any, Any, Any], tuple[Any, Any]]
"""From gradients, optimizer state, parameters and loss to updates and new state."""

OWN_SHARE = 0.5  # of the own gradient, where an update mixes elements


class Own(NamedTuple):
    """A device's own contribution to a mean in flight.

    Attributes:
      gradients: Its gradients, in the dtypes of the parameters, 0 if not usable.
      valid: Whether there is a message at this place of the queue.
      usable: Whether the gradients are finite and their weight is not 0.
    """

    gradients: optax.Updates
    loss: jax.Array
    valid: jax.Array
    usable: jax.Array

    @classmethod
    def of(
        cls,
        gradients: optax.Updates,
        loss: jax.Array,
        valid: jax.Array,
        usable: jax.Array,
    ) -> "Own":
        """Puts zeros in place of gradients that are not usable.

        An optimizer that deals with NaN itself does not help: P times NaN is NaN.
        """
        zeros = jax.tree.map(jnp.zeros_like, gradients)
        return cls(select(usable, gradients, zeros), loss, valid, usable)


class Kind(NamedTuple):
    """How an optimizer's update depends on gradients.

    Attributes:
      params: Whether P depends on the parameters.
      opt_state: Pytree like the optimizer state, whether P depends on a leaf.
    """

    name: Literal["linear", "elementwise", "mixing"]
    params: bool
    opt_state: optax.OptState


def kind_of(
    update: Update, params: optax.Params, opt_state: optax.OptState, count: int
) -> Kind:
    """Returns how an optimizer's update depends on gradients."""
    losses = [jax.ShapeDtypeStruct((), jnp.float32)] * count
    gradients = [params] * count

    def change(
        gradients: optax.Updates,
        params: optax.Params,
        opt_state: optax.OptState,
        losses: Any,
    ) -> Any:
        return changed(update, params, opt_state, gradients, losses, [True] * count)

    def slopes(gradients: optax.Updates, *rest: Any) -> Any:
        return expanded(lambda *g: change(g, *rest), gradients)[1]

    rest = params, opt_state, losses
    if not works_elementwise(change, gradients, *rest):
        return Kind("mixing", True, jax.tree.map(lambda _: True, opt_state))
    # If P depends on neither gradients (0) nor losses (3), U is linear in the
    # gradients, unless it jumps, as `sign` does, whose derivative is 0 everywhere.
    found = reads(slopes, gradients, *rest)
    jumps = reads(change, gradients, *rest).jumps[0]
    bent = any(jax.tree.leaves((found.any[0], found.any[3], jumps)))
    return Kind(
        "elementwise" if bent else "linear",
        any(jax.tree.leaves(found.any[1])),
        found.any[2],
    )


def changed(
    update: Update,
    params: optax.Params,
    opt_state: optax.OptState,
    gradients: Sequence[Any],
    losses: Sequence[Any],
    taken: Sequence[Any],
) -> Any:
    """Returns the change of the parameters by several updates in turn.

    Each update is made only if its `taken` is true.
    """
    total = None
    for gradient, loss, made in zip(gradients, losses, taken, strict=True):
        updates, state = update(gradient, opt_state, params, loss)
        moved = optax.apply_updates(params, updates)
        sums = updates if total is None else jax.tree.map(jnp.add, total, updates)
        before = jax.tree.map(jnp.zeros_like, updates) if total is None else total
        # An update that is not made leaves parameters and state, where later ones begin
        # there.
        total, params, opt_state = jax.tree.map(
            lambda new, old, made=made: jnp.where(made, new, old),
            (sums, moved, state),
            (before, params, opt_state),
        )
    return total


def predicted(
    kind: Kind,
    update: Update,
    params: optax.Params,
    opt_state: optax.OptState,
    mean: Mean,
    own: Sequence[Own],
    squares: SumOfSquares = sum_of_squares,
) -> Any:
    """Returns the parameters to which the gradients in flight will lead.

    An own gradient that is not usable is taken to be zero, or m where elements mix.
    Before any mean has been applied, the own gradient stands in for m.
    """
    known = mean.known
    # Before the first mean, the own gradient takes its place. `g - m` is then 0, and
    # the prediction is U of the own gradient.
    last = like(mean.gradients, params)
    losses = [jnp.where(known, mean.loss, each.loss) for each in own]
    # A gradient that is not usable still moves moments by m, as the mean in flight
    # will.
    taken = [each.valid & (known | each.usable) for each in own]
    means = [select(known, last, each.gradients) for each in own]
    if kind.name == "mixing":
        blends = [
            select(each.usable, _blended(m, each.gradients), m)
            for m, each in zip(means, own, strict=True)
        ]
        change = changed(update, params, opt_state, blends, losses, taken)
        return _moved(params, finite(change))

    def change_by(*gradients: optax.Updates) -> Any:
        return changed(update, params, opt_state, gradients, losses, taken)

    # Before the first mean, `g - m` is 0, and bounds have no effect.
    bounds = bounds_of(change_by, last, len(own), squares)
    found = expansion(change_by, means, bounds)
    # The first-order term of each gradient in flight.
    change = found.change
    for each, m, slope in zip(own, means, found.slopes, strict=True):
        change = jax.tree.map(
            lambda u, p, g, a: along(u, p, g - a), change, slope, each.gradients, m
        )
    return _moved(params, change)


def anchored(
    kind: Kind,
    update: Update,
    params: optax.Params,
    opt_state: optax.OptState,
    mean: Mean,
    behind: Sequence[jax.Array],
    dtype: DTypeLike,
) -> tuple[Any, Slopes | None]:
    """Returns the part of a prediction that does not depend on a device.

    The prediction is `c + P g_own` with `c = w + U(m; s) - P m`. With a sharded
    optimizer, the owners of its state find c and P, and send both. Devices have P in 8
    bits, and c is made with this P: its error is multiplied by `g_own - m` alone.

    Without gradients in `mean`, devices find P by themselves, and m is 0. P is `None`
    where devices need none.
    """
    count, taken, m = len(behind), [*behind], jax.tree.map(jnp.zeros_like, params)
    if mean.gradients is not None:
        m = like(mean.gradients, params)
        taken = [valid & mean.known for valid in behind]

    def change_by(*gradients: optax.Updates) -> Any:
        losses = [mean.loss] * count
        return changed(update, params, opt_state, gradients, losses, taken)

    if mean.gradients is None or kind.name == "mixing":
        return _moved(params, finite(change_by(*[m] * count))), None
    steepest = bounds_of(change_by, m, count)
    bounds = None if kind.name == "linear" else steepest
    found = expansion(change_by, [m] * count, bounds)
    codes = tuple(
        jax.tree.map(lambda p, b: encoded(p, b, dtype), slope, steepest)
        for slope in found.slopes
    )
    slopes = Slopes(codes, (steepest,) * count)
    change = found.change
    # Devices will add `P g` with the P that they decode. The rounding of P then cancels
    # where g is m.
    for slope in slopes.decoded():
        change = jax.tree.map(lambda u, p, a: along(u, p, -a), change, slope, m)
    return _moved(params, change), slopes


def along(value: jax.Array, slope: jax.Array, by: jax.Array) -> jax.Array:
    """Returns `value + slope * by`, also where JAX must promote nothing itself."""
    dtype = promoted(promoted(value.dtype, slope.dtype), by.dtype)
    return value.astype(dtype) + slope.astype(dtype) * by.astype(dtype)


def like(gradients: optax.Updates, params: optax.Params) -> Any:
    """Returns gradients in the dtypes of the parameters, zeros in place of `None`."""
    gradients = with_zeros(gradients, params)
    return jax.tree.map(lambda g, w: g.astype(w.dtype), gradients, params)


def _blended(mean: Tree, own: Tree) -> Tree:
    """Returns m, moved towards the own gradient."""
    return jax.tree.map(lambda m, g: m + OWN_SHARE * (g - m), mean, own)


def _moved(params: optax.Params, change: Tree) -> optax.Params:
    def moved(w: jax.Array, u: jax.Array) -> jax.Array:
        dtype = promoted(w.dtype, u.dtype)
        return (w.astype(dtype) + u.astype(dtype)).astype(w.dtype)

    return jax.tree.map(moved, params, change)
