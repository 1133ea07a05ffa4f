"""The leaves of a gradient of which only the number of elements is known."""

from pipejax.vectors import Shapes

SIDE = 1024


def square_leaves(elements: int) -> Shapes:
    """Matrices of 1,024 x 1,024, one with what rows are left, and the rest a vector.

    What `power_sgd` sends depends on the shapes: of a square matrix of side s, at rank
    r, `2 r s` numbers instead of `s^2`. Larger matrices send a smaller share.

    Args:
      elements: of the gradient.

    >>> square_leaves(3_000_000)
    ((1024, 1024), (1024, 1024), (881, 1024), (704,))
    """
    rows, rest = divmod(elements, SIDE)
    whole, left = divmod(rows, SIDE)
    shapes = [(SIDE, SIDE)] * whole + ([(left, SIDE)] if left else [])
    return (*shapes, *([(rest,)] if rest else []))
