"""What counts as a whole number where a user gives one."""

import operator
from typing import Any


def is_integer(value: Any, least: int) -> bool:
    """Whether it is an integer, NumPy's too but no bool, of at least `least`."""
    if isinstance(value, bool):
        return False
    try:
        return operator.index(value) >= least
    except TypeError:
        return False
