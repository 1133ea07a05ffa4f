"""The number of faults in an hour that a job has to expect."""

import math
import os
from collections.abc import Mapping

VARIABLE = "PIPEJAX_FAULTS_PER_HOUR"
"""The variable with this number, which `pipejax launch` sets."""
SELDOM = 1 / 24
"""The number where nothing is known: one a day."""


def faults_per_hour(environ: Mapping[str, str] = os.environ) -> float:
    """Returns the number that the variable holds, or `SELDOM` without it.

    Raises a `ValueError` if it is not a number above 0.
    """
    if not (text := environ.get(VARIABLE, "")):
        return SELDOM
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise ValueError(
            f"{VARIABLE} must be a number above 0, got {text!r}. Set the number of"
            " faults that the job has in an hour, or unset it."
        )
    return found


def estimated(faults: int, hours: float) -> float:
    """Returns an estimate from what a job has seen, which begins with `SELDOM`.

    What is known before counts as one hour.
    """
    return (faults + SELDOM) / (hours + 1.0)
