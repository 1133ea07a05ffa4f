"""The curvature that a learning rate meets: the largest eigenvalue of a loss's Hessian.

The Hessian is never formed. Lanczos' method asks for its products with some ten
vectors, each the derivative of the gradient along a direction, which costs about as
much as two gradients.

Of Adam, and of whatever divides its updates by a vector p, what counts is the
curvature of the loss in coordinates in which it does not,

  `P^(-1/2) H P^(-1/2)`, `P = diag(p)`

References: Cohen et al., Gradient Descent on Neural Networks Typically Occurs at the
Edge of Stability, 2021, https://arxiv.org/abs/2103.00065; the same, Adaptive Gradient
Methods at the Edge of Stability, 2022, https://arxiv.org/abs/2207.14484
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree


def sharpness(
    loss_fn: Callable[..., jax.Array],
    params: optax.Params,
    *args: Any,
    preconditioner: optax.Params | None = None,
    rtol: float = 1e-2,
) -> float:
    """The largest eigenvalue of the Hessian of a loss, by `scipy.sparse.linalg.eigsh`.

    What `max_learning_rate` wants to know, and what `max_curvature` is to be held
    against. Networks train near the limit of what is stable, so measure where the
    learning rate is largest, in a run that is synchronous.

    Args:
      loss_fn: from `params` and `args` to a number; twice differentiable, forwards over
        backwards. It is compiled once for each shape.
      params: where. A pytree of floating arrays.
      *args: what else it takes, a batch: of some hundred examples or more, for a small
        batch is sharper than the mean of many. Of several processes, the same on all.
      preconditioner: p, like `params` and above 0: what the optimizer divides its
        updates by, `sqrt(nu) + eps` of Adam. Its limits are those of its first moment.
      rtol: how exactly, relative to the eigenvalue.

    Returns:
      The eigenvalue, in loss over parameter squared. Below 0 where the loss curves down
      in every direction.

    Raises:
      ValueError: if `preconditioner` is not like `params`, or not above 0, if `rtol`
        is not between 0 and 1, or if a second derivative is not finite.

    >>> import jax.numpy as jnp, optax, pipejax as pj
    >>> def loss_fn(params, curvatures):
    ...     return jnp.sum(curvatures * params**2) / 2
    >>> curvatures = jnp.array([1.0, 5.0, 20.0])
    >>> found = pj.stability.sharpness(loss_fn, jnp.ones(3), curvatures)
    >>> limit = pj.stability.max_curvature(optax.sgd(0.1, momentum=0.9), width=2)
    >>> f"{found:.2f} of {limit:.2f}"
    '20.00 of 10.00'
    """
    from scipy.sparse.linalg import LinearOperator, eigsh  # slow to import

    if not 0 < rtol < 1:
        raise ValueError(
            f"`rtol` must lie in (0, 1), got {rtol!r}: how far off the eigenvalue may"
            " be, relative to it."
        )
    scale = jax.tree.map(jnp.ones_like, params)
    if preconditioner is not None:
        _check_preconditioner(preconditioner, params)
        scale = jax.tree.map(lambda p: 1 / jnp.sqrt(p), preconditioner)
    at = ravel_pytree(params)[0]
    dtype = jnp.promote_types(at.dtype, jnp.float32)

    def along(direction: np.ndarray) -> np.ndarray:
        product = np.asarray(_product(loss_fn, params, args, scale, direction), dtype)
        if not np.isfinite(product).all():
            raise ValueError(
                "`loss_fn` must have finite second derivatives at `params`; got one"
                " that is not. Look for NaN in `params`, or for a square root at 0."
            )
        return product

    start = np.random.default_rng(0).normal(size=at.size).astype(dtype)
    first = along(start)
    if not first.any():  # a straight line, with which ARPACK cannot begin
        return 0.0
    if at.size == 1:
        return float(first[0] / start[0])
    operator = LinearOperator((at.size, at.size), matvec=along, dtype=dtype)
    # With 8 vectors at a time the first pass is mostly enough: 9 products, where the
    # default of 20 takes 21.
    (largest,) = eigsh(
        operator,
        k=1,
        which="LA",
        ncv=min(at.size, 8),
        v0=start,
        tol=rtol,
        return_eigenvectors=False,
    )
    return float(largest)


@functools.partial(jax.jit, static_argnums=0)
def _product(
    loss_fn: Callable[..., jax.Array],
    params: optax.Params,
    args: tuple[Any, ...],
    scale: optax.Params,
    direction: np.ndarray,
) -> jax.Array:
    """`S H S direction`, S diagonal; all as flat vectors."""
    flat, unravel = ravel_pytree(params)

    def scaled(tree: optax.Params) -> optax.Params:
        return jax.tree.map(lambda x, s: (x * s).astype(x.dtype), tree, scale)

    gradient = jax.grad(lambda at: loss_fn(at, *args))
    tangent = scaled(unravel(jnp.asarray(direction, flat.dtype)))
    _, product = jax.jvp(gradient, (params,), (tangent,))
    return ravel_pytree(scaled(product))[0]


def _check_preconditioner(preconditioner: Any, params: optax.Params) -> None:
    shapes, wanted = _shapes(preconditioner), _shapes(params)
    if shapes != wanted:
        raise ValueError(
            f"`preconditioner` must be like `params`, of shapes {wanted}; got {shapes}."
            " Of Adam it is a tree of `sqrt(nu) + eps`."
        )
    least = np.min([np.min(x) for x in jax.tree.leaves(preconditioner)])
    if not least > 0:
        raise ValueError(
            f"`preconditioner` must be above 0 everywhere, got {float(least)!r}: it is"
            " what updates are divided by. Of Adam add `eps` to `sqrt(nu)`."
        )


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path): jnp.shape(leaf) for path, leaf in leaves}
