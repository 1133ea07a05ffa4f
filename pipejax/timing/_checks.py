"""Checks numbers, and returns them as numbers of Python, also if NumPy made them."""

import math
import operator
from typing import Any

from pipejax._internal.integers import is_integer
from pipejax._internal.numbers import number

MOST = 10**9


def check_count(argument: str, value: Any) -> int:
    """Returns a number of hosts or devices as an int, or raises a `ValueError`."""
    if not is_integer(value, 1) or value > MOST:
        raise ValueError(
            f"`{argument}` must be a whole number of at least 1 and at most {MOST:,},"
            f" got {value!r:.40}."
        )
    return operator.index(value)


def check_seconds(argument: str, value: Any) -> float:
    """Returns seconds as a float, or raises a `ValueError` that names the argument."""
    if not 0 <= number(value) < math.inf:
        raise ValueError(
            f"`{argument}` must be at least 0 seconds and finite; got {value!r:.40}."
            " Write 50 microseconds as 50e-6."
        )
    return number(value)


def check_elements(argument: str, value: Any) -> int:
    """Returns a number of elements as an int, or raises a `ValueError`."""
    if not is_integer(value, 1):
        raise ValueError(
            f"`{argument}` must be a whole number of elements above 0; got"
            f" {value!r:.40}. Write 4 million as 4_000_000 or int(4e6)."
        )
    return operator.index(value)


def check_speed(argument: str, value: Any) -> float:
    """Returns bytes per second as a float, or raises a `ValueError`."""
    if not number(value) > 0:
        raise ValueError(
            f"`{argument}` must be above 0 bytes per second; got {value!r:.40}. Write 1"
            " Gbit/s as 125e6, or give math.inf for work that takes no time."
        )
    return number(value)


def store(record: Any, **values: float) -> None:
    """Sets fields of a frozen dataclass that is being made."""
    for name, value in values.items():
        object.__setattr__(record, name, value)
