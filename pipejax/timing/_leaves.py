"""Assumed leaves of a gradient whose number of elements alone is known."""

from pipejax._internal.ravel import Shapes

from ._checks import check_elements

SIDE = 1024


def square_leaves(elements: int) -> Shapes:
    """Returns leaves with a given number of elements, mostly matrices of 1,024 x 1,024.

    The rows that are left over form a smaller matrix, and the rest forms a vector. The
    payload of `power_sgd` depends on these shapes: at rank r, a square matrix with s
    rows is sent as `2 r s` numbers instead of `s^2`. The assumption is therefore
    pessimistic for a model with larger matrices.

    Args:
      elements: The number of elements of the gradient.

    Raises:
      ValueError: If `elements` is not a whole number above 0.

    Examples:
      >>> import pipejax as pj
      >>> pj.timing.square_leaves(3_000_000)
      ((1024, 1024), (1024, 1024), (881, 1024), (704,))
    """
    rows, rest = divmod(check_elements("elements", elements), SIDE)
    whole, left = divmod(rows, SIDE)
    shapes = [(SIDE, SIDE)] * whole + ([(left, SIDE)] if left else [])
    return (*shapes, *([(rest,)] if rest else []))
