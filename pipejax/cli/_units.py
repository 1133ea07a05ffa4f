"""Numbers and their units, as the command line takes them."""

import re
from fractions import Fraction

from ._usage import UsageError

_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_RATES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_NUMBER = r"(\d{1,40}(?:\.\d{1,40})?|\.\d{1,40})"
MOST = 10**13
"""The largest count."""
VECTOR = 2**32
"""The largest number of elements of a vector that is measured."""
COMPUTE_MS = 1e-6, 10**12
"""The range of the milliseconds that a step computes."""
ROUNDS = 10_000
"""The largest number of rounds of a measurement."""


def count(option: str, text: str, most: int = MOST) -> int:
    """Reads a count, such as `300M`, `1.3B`, `70k` or `4194304`."""
    found = re.fullmatch(_NUMBER + r"([kmbgt]?)", text.replace("_", "").lower())
    number = Fraction(found[1]) * _COUNTS[found[2]] if found else Fraction(0)
    if not 1 <= number <= most or number.denominator != 1:
        raise UsageError(
            f"`--{option}` must be a whole number above 0, or one with k, M, B or T,"
            f" such as 300M, and at most {most:,}; got {text!r:.40}"
        )
    return int(number)


def bits(option: str, text: str) -> float:
    """Reads a rate in bits per second, such as `10gbit`, `500mbit` or `2.5Gbit/s`."""
    # A bare number or GB/s is refused, because it may mean bytes.
    found = re.fullmatch(_NUMBER + r"([kmgt]?)bit(?:/s|ps)?", text.lower())
    rate = Fraction(found[1]) * _RATES[found[2]] if found else Fraction(0)
    if not 1 <= rate <= 10**18:
        raise UsageError(
            f"`--{option}` must be a number above 0 with bit, kbit, mbit, gbit or tbit"
            " a second, such as 10gbit, from 1bit to 1000000tbit; got"
            f" {text!r:.40}. A byte has 8 bits"
        )
    return float(rate)


def check(option: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        limit = f"at most {most:,}" if value > most else f"at least {least:,}"
        raise UsageError(f"`--{option}` must be {limit}, got {value!s:.40}")
