"""Shows that a delay costs less and less for smooth losses in random order.

Agarwal and Duchi bound the excess of the averaged iterate by two terms. The noise
contributes a term of order `1 / sqrt(T)`, whatever the delay. The delay contributes a
term of order `tau^2 / T`. At the same learning rate, a run with a delay is therefore
behind a run without a delay at first, but not at the end.

Reference: Distributed Delayed Stochastic Optimization, 2011,
  https://arxiv.org/abs/1104.5525
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from pipejax import problems

from ._run import epochs, path


def excess_of_averages(
    problem: problems.Problem,
    widths: tuple[int, ...],
    times: np.ndarray,
    seeds: tuple[int, ...],
) -> dict[str, Any]:
    """Returns `F(mean of w) - F(w*)` at each of `times`, a row for each width.

    The learning rate is that of the paper, `1 / (s + n sqrt(t))`. Here s is the
    smoothness times the largest width, so that all widths have the same learning rate,
    and n is the noise divided by the distance from the start to the optimum.
    """
    away = float(np.linalg.norm(problem.optimum))
    smooth, noise = problem.smoothness * max(widths), problem.lipschitz(0.0) / away
    tx = optax.sgd(lambda count: 1 / (smooth + noise * jnp.sqrt(count + 1.0)))
    rows = {}
    for width in widths:
        found = []
        for seed in seeds:
            batches = epochs(problem, int(times[-1]), 1, seed)
            run = path(problem, tx, width, batches).astype(np.float64)
            means = np.cumsum(run, axis=0)[times - 1] / times[:, None]
            found.append([problem.excess(w) for w in means])
        rows[str(width)] = np.mean(found, axis=0).tolist()
    return rows
