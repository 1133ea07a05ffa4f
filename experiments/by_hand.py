"""Training steps written by hand, without pipejax, to compare its steps with.

Each function makes a jitted step, which takes the parameters, the optimizer state and a
batch. A step with a delay also takes the stale gradient of each device, before the
batch.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pipejax._internal.mesh import on_mesh

Loss = Callable[..., Any]


def synchronous(
    loss_fn: Loss,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    donate: bool = False,
    checks: bool = False,
) -> Any:
    """Makes a D-Sync step as a tutorial writes it, with one `pmean` per leaf.

    If `checks`, the step skips updates by gradients that are not finite, as pipejax
    does. If `donate`, the step donates the parameters and the optimizer state.
    """

    def local(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        grads = jax.tree.map(lambda g: lax.pmean(g, "data"), grads)
        params, opt_state = _updated(tx, grads, opt_state, params, checks)
        return params, opt_state, lax.pmean(loss, "data")

    return jax.jit(
        on_mesh(local, mesh, (P(), P(), P("data")), P()),
        donate_argnums=(0, 1) if donate else (),
    )


def pipelined(
    loss_fn: Loss,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    predicts: bool = False,
    checks: bool = False,
) -> Any:
    """Makes the best hand-written Pipe-SGD step: one `psum` per leaf, and a barrier.

    The step donates the parameters, the optimizer state and the stale gradients. If
    `predicts`, each device takes its gradient at the parameters that an update by its
    own stale gradient leads to. `checks` is as in `synchronous`.
    """

    def local(params: Any, opt_state: Any, stale: Any, batch: Any) -> Any:
        at = params
        if predicts:
            at, _ = _updated(tx, stale, opt_state, params, checks)
        loss, grads = jax.value_and_grad(loss_fn)(at, batch)
        sums = jax.tree.map(lambda g: lax.psum(g, "data"), stale)
        sums, grads = lax.optimization_barrier((sums, grads))
        mean = jax.tree.map(lambda g: g / mesh.size, sums)
        params, opt_state = _updated(tx, mean, opt_state, params, checks)
        return params, opt_state, grads, loss[None]

    in_specs = (P(), P(), P("data"), P("data"))
    return jax.jit(
        on_mesh(local, mesh, in_specs, (P(), P(), P("data"), P("data"))),
        donate_argnums=(0, 1, 2),
    )


def naive(loss_fn: Loss, tx: optax.GradientTransformation, mesh: Mesh) -> Any:
    """Makes a straightforward Pipe-SGD step: one `pmean` per leaf, no barrier."""

    def local(params: Any, opt_state: Any, stale: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        mean = jax.tree.map(lambda g: lax.pmean(g, "data"), stale)
        updates, opt_state = tx.update(mean, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, grads, loss[None]

    in_specs = (P(), P(), P("data"), P("data"))
    return jax.jit(on_mesh(local, mesh, in_specs, (P(), P(), P("data"), P("data"))))


def applied_first(loss_fn: Loss, tx: optax.GradientTransformation, mesh: Mesh) -> Any:
    """Makes a step whose compute waits for the stale sum, so that nothing hides it."""

    def local(params: Any, opt_state: Any, stale: Any, batch: Any) -> Any:
        mean = jax.tree.map(lambda x: lax.pmean(x, "data"), stale)
        updates, opt_state = tx.update(mean, opt_state, params)
        params = optax.apply_updates(params, updates)
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        return params, opt_state, grads, loss[None]

    in_specs = (P(), P(), P("data"), P("data"))
    return jax.jit(on_mesh(local, mesh, in_specs, (P(), P(), P("data"), P("data"))))


def _updated(
    tx: optax.GradientTransformation,
    grads: Any,
    opt_state: Any,
    params: Any,
    checks: bool,
) -> tuple[Any, Any]:
    """Returns the parameters and the optimizer state after an update.

    If `checks` and any gradient is not finite, both are returned unchanged.
    """

    def update() -> tuple[Any, Any]:
        updates, after = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), after

    if not checks:
        return update()
    finite = [jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]
    return lax.cond(jnp.stack(finite).all(), update, lambda: (params, opt_state))
