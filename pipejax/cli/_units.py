"""Numbers with units, as the command line takes them."""

import re

from ._usage import UsageError

_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_RATES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_NUMBER = r"(\d+(?:\.\d+)?|\.\d+)"


def count(option: str, text: str) -> int:
    """Reads a count, such as `300M`, `1.3B`, `70k` or `4194304`.

    Args:
      option: The name of the option, for the error message.
      text: The text to read.

    Returns:
      The count, at least 1.

    Raises:
      UsageError: If `text` is anything else, such as 0 or a fraction.

    Examples:
      >>> count("parameters", "1.3B")
      1300000000
    """
    found = re.fullmatch(_NUMBER + r"([kmbgt]?)", text.replace("_", "").lower())
    number = float(found[1]) * _COUNTS[found[2]] if found else 0.0
    # Decimals such as 1.3 are rounded in binary, so 1.3 * 10^9 is only almost whole.
    whole = round(number)
    if whole < 1 or abs(number - whole) > 1e-9 * number:
        raise UsageError(
            f"`--{option}` must be a whole number above 0, or one with k, M, B or T,"
            f" such as 300M; got {text!r}"
        )
    return whole


def bits(option: str, text: str) -> float:
    """Reads a rate in bits per second, such as `10gbit`, `500mbit` or `2.5Gbit/s`.

    Args:
      option: The name of the option, for the error message.
      text: The text to read.

    Returns:
      The rate in bits per second, above 0.

    Raises:
      UsageError: If `text` is anything else. A bare number or `GB/s` is refused,
        because it may mean bytes.

    Examples:
      >>> bits("bandwidth", "2.5Gbit/s")
      2500000000.0
    """
    found = re.fullmatch(_NUMBER + r"([kmgt]?)bit(?:/s|ps)?", text.lower())
    rate = float(found[1]) * _RATES[found[2]] if found else 0.0
    if not rate > 0:
        raise UsageError(
            f"`--{option}` must be a number above 0 with bit, kbit, mbit, gbit or tbit"
            f" a second, such as 10gbit; got {text!r}. A byte has 8 bits"
        )
    return rate
