"""Where losses are smooth and examples come by chance, a delay costs less and less.

Agarwal and Duchi: the excess of the averaged iterate is of order `1 / sqrt(T)` from the
noise, whatever the delay, and of order `tau^2 / T` from the delay. So beside a run
without delay, at the same step, a run with one is behind at first and not in the end.

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
    """`F(mean of w) - F(w*)` by each of `times`, a row a width.

    The step is theirs, `1 / (s + n sqrt(t))`, with s the smoothness times the greatest
    width, so that all widths take the same, and n the noise over the distance.
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
