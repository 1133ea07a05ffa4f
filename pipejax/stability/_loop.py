r"""A pipeline of width K on a quadratic, written as a closed loop with one matrix.

Let `lambda` be the curvature, w the distance of the parameter to the optimum, s the
optimizer state and f the vector of the K-1 gradients in flight, oldest first. With
`x = (s, w, f)`, one step is

$$x' = (F + \lambda G H) x$$

The row vector H selects where the gradient is taken, so the new gradient is
`lambda H x`. The column vector G says where the new gradient enters: at the end of the
queue, or at width 1 directly in the optimizer. Because `G H` has rank one, the
characteristic polynomial is linear in the curvature, `p(z) + lambda q(z)`. With
learning rate eta and momentum mu, it is `z (z - 1) (z - mu) + eta lambda z` for
heavy-ball at K=2.

With weight prediction, the mean over devices follows the loop of width 1. A second loop
describes the deviation e, the gradient of one device minus the mean over devices. Its
state is the device's K-1 deviations in flight. For heavy-ball at K=3, its polynomial is
`z^2 + eta lambda z + (1 + mu) eta lambda`.
"""

from typing import NamedTuple

import numpy as np

from ._linear import LinearUpdate


class Loop(NamedTuple):
    """The closed loop `x' = (F + curvature * G H) x` over a state x of n numbers."""

    transition: np.ndarray  # F, float64 [n, n]: the step without a loss
    enters: np.ndarray  # G, float64 [n]: where a new gradient enters the state
    taken_at: np.ndarray  # H, float64 [n]: the point at which the gradient is taken

    def matrix(self, curvature: float) -> np.ndarray:
        return self.transition + curvature * np.outer(self.enters, self.taken_at)

    def polynomials(self) -> tuple[np.ndarray, np.ndarray]:
        identity = np.eye(len(self.transition))
        # The Faddeev-LeVerrier algorithm computes the coefficients, highest power
        # first, from the entries of the matrices: p(z) = det(z - F) and
        # q(z) = -H adj(z - F) G. It is more exact than eigenvalues would be: those that
        # coincide, as the ones of a queue do, lose half of their digits.
        p, q, adjugate = [1.0], [0.0], np.zeros_like(identity)
        for k in range(1, len(identity) + 1):
            adjugate = self.transition @ adjugate + p[-1] * identity
            q.append(-float(self.taken_at @ adjugate @ self.enters))
            p.append(-float(np.trace(self.transition @ adjugate)) / k)
        return _exact(p), _exact(q)


def loop(update: LinearUpdate, width: int, at_once: float = 0.0) -> Loop:
    """Returns the loop of an optimizer at a width, under a plain delay.

    The share `at_once` of each gradient enters the optimizer in its own step.
    """
    inner, waiting = len(update.gradient), width - 1
    size = inner + waiting
    transition, (enters, taken_at) = np.zeros((size, size)), np.zeros((2, size))
    transition[:inner, :inner] = update.state
    taken_at[inner - 1] = 1
    if waiting:
        # The oldest gradient in flight enters the optimizer, and the others move up.
        transition[:inner, inner] = update.gradient
        transition[inner:-1, inner + 1 :] = np.eye(waiting - 1)
        enters[:inner] = at_once * update.gradient
        enters[-1] = 1 - at_once
    else:
        enters[:] = update.gradient
    return Loop(transition, enters, taken_at)


def deviations(update: LinearUpdate, width: int) -> Loop:
    """Returns the loop of one device's deviations, with weight prediction."""
    length = width - 1
    response, moved = update.gradient, np.zeros(length)
    # A prediction applies the newest deviation last. It moves the parameter by one
    # update, whereas older ones keep acting through the optimizer state.
    for age in reversed(range(length)):
        moved[age] = response[-1]
        response = update.state @ response
    return Loop(np.eye(length, k=1), np.eye(length)[-1], moved)


def _exact(coefficients: list[float]) -> np.ndarray:
    """Returns the coefficients with rounding errors set to 0."""
    # On the unit circle a rounding error is negligible beside the other coefficients.
    # As the first or the last coefficient of a polynomial, however, it would add a root
    # far outside or far inside the circle.
    found = np.array(coefficients)
    return np.where(np.abs(found) < 1e-13 * np.abs(found).max(), 0.0, found)
