"""The recursion of width K on a quadratic, as one matrix.

With `lambda` the curvature, w the distance to the optimum, s the optimizer's state and
`q` the K-1 gradients in flight, one step is `x' = (F + lambda G H) x` of
`x = (s, w, q)`: `H x` is where the gradient is taken, `G` where it enters the queue.
Since one number enters in one place, the characteristic polynomial is a straight line
in the curvature, `p(z) + lambda q(z)`:

- SGD, K=1: `z - 1 + eta lambda`
- SGD, K=2: `z (z - 1) + eta lambda`
- heavy-ball, K=2: `z (z - 1) (z - mu) + eta lambda z`

With weight prediction the mean over devices is that of width 1. What each device's
gradient differs from it by, e, has a loop of its own, whose state is the K-1 of them in
flight and the one before, which may be fed back, `e[t] = lambda (H e)`. Its polynomial,
but for roots at zero:

- heavy-ball, K=2: `z + eta lambda`; fed back `z^2 + eta lambda z + c eta lambda`
- heavy-ball, K=3: `z^2 + eta lambda z + (1 + mu) eta lambda`
"""

from typing import NamedTuple

import numpy as np

from ._linear import LinearUpdate


class Loop(NamedTuple):
    """`x' = (transition + curvature * enters * taken_at) x`, see above.

    Attributes:
      transition: F, [n, n].
      enters: G, [n].
      taken_at: H, [n].
    """

    transition: np.ndarray
    enters: np.ndarray
    taken_at: np.ndarray

    def matrix(self, curvature: float) -> np.ndarray:
        """One step at this curvature."""
        return self.transition + curvature * np.outer(self.enters, self.taken_at)

    def polynomials(self) -> tuple[np.ndarray, np.ndarray]:
        """p and q of `p(z) + curvature q(z)`, of one length, highest power first.

        By Faddeev and LeVerrier from the matrices' own entries: `p = det(z - F)` and
        `q = -H adj(z - F) G`. Eigenvalues that coincide, as those of a queue do, lose
        half their digits.
        """
        identity = np.eye(len(self.transition))
        p, q, adjugate = [1.0], [0.0], np.zeros_like(identity)
        for k in range(1, len(identity) + 1):
            adjugate = self.transition @ adjugate + p[-1] * identity
            q.append(-float(self.taken_at @ adjugate @ self.enters))
            p.append(-float(np.trace(self.transition @ adjugate)) / k)
        return _exact(p), _exact(q)


def loop(update: LinearUpdate, width: int) -> Loop:
    """The loop of an optimizer at a width."""
    inner, waiting = len(update.gradient), width - 1
    size = inner + waiting
    transition, enters, taken_at = (
        np.zeros((size, size)),
        np.zeros(size),
        np.zeros(size),
    )
    transition[:inner, :inner] = update.state
    taken_at[inner - 1] = 1
    if waiting:
        transition[:inner, inner] = update.gradient
        transition[inner:-1, inner + 1 :] = np.eye(waiting - 1)
        enters[-1] = 1
    else:
        enters[:] = update.gradient
    return Loop(transition, enters, taken_at)


def deviations(update: LinearUpdate, width: int, feedback: float) -> Loop:
    """The loop of one device's gradients in flight beside their means."""
    response, moved = update.gradient, np.zeros(width)
    for age in reversed(range(1, width)):  # the newest is applied last, and once
        moved[age] = response[-1]
        response = update.state @ response
    moved[0] = feedback * moved[1]
    return Loop(np.eye(width, k=1), np.eye(width)[-1], moved)


def _exact(coefficients: list[float]) -> np.ndarray:
    """Without what rounding has left of zeros.

    Beside the others it is nothing on the unit circle, but as the first or last of a
    polynomial it would be a root, far outside or inside.
    """
    found = np.array(coefficients)
    return np.where(np.abs(found) < 1e-13 * np.abs(found).max(), 0.0, found)
