"""Numbers with units, as a command line is given them."""

import re

from ._usage import UsageError

_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_RATES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_NUMBER = r"(\d+(?:\.\d+)?|\.\d+)"


def count(option: str, text: str) -> int:
    """Reads a number of things: `300M`, `1.3B`, `70k`, `4194304`.

    Raises:
      UsageError: for anything else, a fraction of one, or 0.
    """
    found = re.fullmatch(_NUMBER + r"([kmbgt]?)", text.replace("_", "").lower())
    number = float(found[1]) * _COUNTS[found[2]] if found else 0.0
    # A decimal such as 1.3 is no binary fraction: times 10^9 it is whole to rounding.
    whole = round(number)
    if whole < 1 or abs(number - whole) > 1e-9 * number:
        raise UsageError(
            f"`--{option}` must be a whole number above 0, or one with k, M, B or T,"
            f" such as 300M; got {text!r}"
        )
    return whole


def bits(option: str, text: str) -> float:
    """Reads a rate in bits a second: `10gbit`, `500mbit`, `2.5Gbit/s`.

    Raises:
      UsageError: for anything else. A bare number or `GB/s` might mean bytes.
    """
    found = re.fullmatch(_NUMBER + r"([kmgt]?)bit(?:/s|ps)?", text.lower())
    rate = float(found[1]) * _RATES[found[2]] if found else 0.0
    if not rate > 0:
        raise UsageError(
            f"`--{option}` must be a number above 0 with bit, kbit, mbit, gbit or tbit"
            f" a second, such as 10gbit; got {text!r}. A byte has 8 bits"
        )
    return rate
