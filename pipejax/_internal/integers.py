"""The check for integer arguments that users pass."""

import operator
from typing import Any


def is_integer(value: Any, least: int) -> bool:
    """Returns whether a value is an integer of at least `least`.

    Python's and NumPy's integers count, and so do integer arrays without dimensions. A
    bool does not count, and neither does a float that has an integer value.
    """
    if isinstance(value, bool):
        return False
    try:
        return operator.index(value) >= least
    except TypeError:
        return False
