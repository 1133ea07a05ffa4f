"""The check for integer arguments that users pass."""

import operator
from typing import Any


def is_integer(value: Any, least: int) -> bool:
    """Returns whether a value is an integer of at least `least`.

    Integer arrays without dimensions count, but neither a bool nor a float does.
    """
    if isinstance(value, bool):
        return False
    try:
        return operator.index(value) >= least
    except TypeError:
        return False
