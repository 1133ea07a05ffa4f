"""Sharpness: the largest eigenvalue of the Hessian of a loss, without the Hessian.

The Lanczos method needs the products of the Hessian with about ten vectors. Each
product is the derivative of the gradient along a direction, and costs about as much as
two gradients.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from pipejax._internal.numbers import check_inexact, number
from pipejax._internal.ravel import promoted
from pipejax._internal.structures import shapes


def sharpness(
    loss_fn: Callable[..., jax.Array],
    params: optax.Params,
    *args: Any,
    preconditioner: optax.Params | None = None,
    rtol: float = 1e-2,
) -> float:
    r"""Returns the largest eigenvalue of the Hessian of a loss.

    Compare the eigenvalue with `max_curvature`, or pass it to `max_learning_rate` as
    `curvature`, to find out whether a width is stable for a real model. Measure at
    several points in the first half of a synchronous run, and take the median: at the
    peak of the learning rate, the sharpness may be several times as large as elsewhere.

    Adam divides its updates by a vector p. In the coordinates `sqrt(p) w` of the
    parameters w, the same optimizer works without this division. With p as
    `preconditioner`, the result is the largest eigenvalue in these coordinates, of

    $$P^{-1/2} H P^{-1/2}, P = diag(p)$$

    `scipy.sparse.linalg.eigsh` computes the eigenvalue, usually from ten products of
    this matrix with a vector.

    Args:
      loss_fn: The loss, `loss_fn(params, *args) -> scalar`. It must support
        forward-mode over reverse-mode differentiation.
      params: A pytree of floating arrays, the point at which the Hessian is taken.
      *args: The other arguments of `loss_fn`, usually a batch of at least a few hundred
        examples: the loss on a small batch is sharper. Pass the same one on all
        processes.
      preconditioner: A pytree like `params` with elements above 0: the vector p by
        which the optimizer divides its updates. For Adam it is `sqrt(nu) + eps`;
        compare the result with the limit of its first moment,
        `optax.chain(optax.ema(b1, debias=False), optax.scale(-learning_rate))`.
      rtol: Relative tolerance of the eigenvalue, in (0, 1).

    Returns:
      The eigenvalue, in units of loss per squared parameter. It is negative where the
      loss curves down in every direction.

    Raises:
      ValueError: If an argument breaks its rule, or a second derivative is not finite.

    Examples:
      >>> import jax.numpy as jnp, optax, pipejax as pj
      >>> def loss_fn(params, curvatures):
      ...     return jnp.sum(curvatures * params**2) / 2
      >>> curvatures = jnp.array([1.0, 5.0, 20.0])
      >>> found = pj.stability.sharpness(loss_fn, jnp.ones(3), curvatures)
      >>> limit = pj.stability.max_curvature(optax.sgd(0.1, momentum=0.9), width=2)
      >>> f"{found:.2f} of {limit:.2f}"
      '20.00 of 10.00'

    References:
      Cohen et al., Gradient Descent on Neural Networks Typically Occurs at the Edge of
      Stability, 2021, https://arxiv.org/abs/2103.00065

      Cohen et al., Adaptive Gradient Methods at the Edge of Stability, 2022,
      https://arxiv.org/abs/2207.14484
    """
    from scipy.sparse.linalg import LinearOperator, eigsh  # slow to import

    check_inexact("params", params)
    if not 0 < number(rtol) < 1:
        raise ValueError(
            f"`rtol` must lie in (0, 1), got {rtol!r}. It is the largest error of the"
            " eigenvalue, relative to the eigenvalue."
        )
    scale = jax.tree.map(jnp.ones_like, params)
    if preconditioner is not None:
        _check_preconditioner(preconditioner, params)
        scale = jax.tree.map(lambda p: 1 / jnp.sqrt(p), preconditioner)
    at = ravel_pytree(params)[0]
    dtype = promoted(at.dtype, jnp.float32)

    def along(direction: np.ndarray) -> np.ndarray:
        product = np.asarray(_product(loss_fn, params, args, scale, direction), dtype)
        if not np.isfinite(product).all():
            raise ValueError(
                "`loss_fn` must have finite second derivatives at `params`; got one"
                " that is not finite. Look for NaN in `params`, or for a square root at"
                " 0."
            )
        return product

    start = np.random.default_rng(0).normal(size=at.size).astype(dtype)
    first = along(start)
    if not first.any():  # a linear loss: ARPACK cannot start from a zero vector
        return 0.0
    if at.size == 1:
        return float(first[0] / start[0])
    operator = LinearOperator((at.size, at.size), matvec=along, dtype=dtype)
    # With 8 Lanczos vectors the first pass usually suffices and takes 9 products. The
    # default, 20 vectors, takes 21 products.
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
    """Returns the flat vector `S H S direction`, where S is `scale` as a diagonal."""
    flat, unravel = ravel_pytree(params)

    def scaled(tree: optax.Params) -> optax.Params:
        return jax.tree.map(lambda x, s: (x * s).astype(x.dtype), tree, scale)

    gradient = jax.grad(lambda at: loss_fn(at, *args))
    tangent = scaled(unravel(jnp.asarray(direction, flat.dtype)))
    _, product = jax.jvp(gradient, (params,), (tangent,))
    return ravel_pytree(scaled(product))[0]


def _check_preconditioner(preconditioner: Any, params: optax.Params) -> None:
    found, wanted = shapes(preconditioner), shapes(params)
    if found != wanted:
        raise ValueError(
            f"`preconditioner` must be like `params`, with shapes {wanted}; got"
            f" {found}. For Adam, pass a tree of `sqrt(nu) + eps`."
        )
    least = np.min([np.min(x) for x in jax.tree.leaves(preconditioner)])
    if not least > 0:
        raise ValueError(
            f"`preconditioner` must be above 0 everywhere, got {float(least)!r}. The"
            " optimizer divides its updates by it. For Adam, add `eps` to `sqrt(nu)`."
        )
