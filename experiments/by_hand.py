"""Steps written by hand, without pipejax: what its own are compared with.

Each is a jitted function of parameters, optimizer state, for the stale ones a gradient
of each device's own, and a batch.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pipejax.mesh import on_mesh

Loss = Callable[..., Any]


def synchronous(
    loss_fn: Loss,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    donate: bool = False,
    checks: bool = False,
) -> Any:
    """D-Sync as a tutorial has it: one `pmean` a leaf.

    `checks` skips updates by gradients that are not finite, as pipejax does.
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
    """Pipe-SGD at its best: a `psum` a leaf, a barrier, everything donated.

    `predicts` takes the gradient after an update by this device's own stale gradient.
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
    """Pipe-SGD as one writes it down: the stale gradient's `pmean`, leaf by leaf."""

    def local(params: Any, opt_state: Any, stale: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        mean = jax.tree.map(lambda g: lax.pmean(g, "data"), stale)
        updates, opt_state = tx.update(mean, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, grads, loss[None]

    in_specs = (P(), P(), P("data"), P("data"))
    return jax.jit(on_mesh(local, mesh, in_specs, (P(), P(), P("data"), P("data"))))


def applied_first(loss_fn: Loss, tx: optax.GradientTransformation, mesh: Mesh) -> Any:
    """A stale sum that the compute waits for: nothing can hide it."""

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
    """An update; if `checks`, none where a gradient is not finite."""

    def update() -> tuple[Any, Any]:
        updates, after = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), after

    if not checks:
        return update()
    finite = [jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]
    return lax.cond(jnp.stack(finite).all(), update, lambda: (params, opt_state))
