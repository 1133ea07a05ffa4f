"""Judges whether predictions from a fit can be relied on.

The gradient of a real model takes as long to exchange as the longest exchange that was
measured, or longer. A fit is therefore judged by its long exchanges.

The limits come from the nine fits in experiments/results/prediction.json. The errors of
their long exchanges are at most 9 % in the median and 30 % at worst. The times of these
exchanges vary by at most 12 % from round to round. Predictions of other exchanges from
these fits are off by 5 to 15 % in the median.

Short exchanges consist mostly of effects that no formula covers, such as threads that
wake up late and bursts that a link lets pass. Their error is reported, but it does not
count against the fit.
"""

import statistics
from typing import Any, NamedTuple

from ._exchange import duration
from ._fit import Fit

LONG = 0.1
"""The share of the longest time from which on an exchange counts as long."""
# Upper limits, a little above the 9 %, 30 % and 12 % of the nine fits.
MEDIAN, WORST, SPREAD = 0.10, 0.35, 0.20
# Lower limits. The median of three times is the first that is not moved by a single
# outlier.
ROUNDS, WIRE = 3, 0.5


class FitQuality(NamedTuple):
    """The verdict on a fit, with its reasons and figures; `str` puts it into words.

    Attributes:
      reasons: Why the fit cannot be trusted, each with a remedy. Empty if it can be
        trusted.
      rounds: The smallest number of times that an exchange was measured.
      spread: The relative standard deviation of an exchange's times, as the median over
        the long exchanges.
      median_error: The median of `|predicted / measured - 1|` over the long exchanges.
      worst_error: The maximum of `|predicted / measured - 1|` over the long exchanges.
      worst: The name of the exchange with the worst error.
      short: The seconds below which an exchange is short.
      short_error: The worst error of the short exchanges; 0 if there are none.
      wire: The share of its time that the largest exchange spends on bytes, according
        to the model.
      largest: The number of elements of the largest vector that was measured; `None` if
        unknown.
    """

    reasons: tuple[str, ...]
    rounds: int
    spread: float
    median_error: float
    worst_error: float
    worst: str
    short: float
    short_error: float
    wire: float
    largest: int | None

    @property
    def trusted(self) -> bool:
        """`True` if there is no reason against the fit."""
        return not self.reasons

    def to_dict(self) -> dict[str, Any]:
        """Returns the verdict and all attributes as types that JSON has."""
        found = {**self._asdict(), "reasons": list(self.reasons)}
        return {"trusted": self.trusted, "verdict": str(self), **found}

    def __str__(self) -> str:
        figures = (
            f"Its error is {self.median_error:.0%} in the median and"
            f" {self.worst_error:.0%} at worst ({self.worst}) for exchanges of"
            f" {_ms(self.short)} and longer, and {self.short_error:.0%} at worst for"
            f" shorter ones; times vary by {self.spread:.0%} over {self.rounds} rounds."
        )
        if self.largest:
            figures += (
                f" Vectors of more than {self.largest:,} elements are extrapolated."
            )
        can = "can" if self.trusted else "cannot"
        return " ".join([f"This fit {can} be trusted.", *self.reasons, figures])


def trust(fit: Fit) -> FitQuality:
    """Judges a fit by its errors, the spread of its times, and the sizes measured.

    An exchange is long if it takes at least a tenth of the longest time. A fit can be
    trusted if all of these hold:

    - The predictions of the long exchanges are off by at most 10 % in the median and
      35 % at worst. Their times vary by at most 20 % in the median.
    - Each exchange was measured at least 3 times.
    - The exchange with the most bytes spends at least half of its time on bytes. The
      times of larger vectors then follow from it.

    Args:
      fit: The fit, with at least one sample.

    Returns:
      The verdict, with the reasons and figures.
    """
    limit = LONG * max(sample.seconds for sample in fit.samples)
    pairs = list(zip(map(abs, fit.errors), fit.samples, strict=True))
    long = [pair for pair in pairs if pair[1].seconds >= limit]
    # There is at least one long exchange: the longest.
    worst_error, worst = max(long, key=lambda pair: pair[0])
    found = FitQuality(
        reasons=(),
        rounds=min(len(sample.times) for sample in fit.samples),
        spread=statistics.median(sample.spread for _, sample in long),
        median_error=statistics.median(error for error, _ in long),
        worst_error=worst_error,
        worst=worst.name,
        short=limit,
        short_error=max((e for e, s in pairs if s.seconds < limit), default=0.0),
        wire=_wire(fit),
        largest=max((s.elements for s in fit.samples if s.elements), default=None),
    )
    return found._replace(reasons=tuple(_reasons(found)))


def _wire(fit: Fit) -> float:
    """Returns the share of the time that the largest exchange spends on its bytes."""
    # Predictions for larger gradients rest on the bandwidth. If most of this time were
    # latency, the fit would hardly have measured the bandwidth.
    largest = max(fit.samples, key=lambda sample: sample.exchange.between.wire)
    parts = duration(fit.cluster, largest.exchange)
    return parts.wire / parts.total


def _reasons(found: FitQuality) -> list[str]:
    busy = "Measure again while nothing else runs on the hosts and their network."
    checks = [
        (
            found.rounds < ROUNDS,
            f"Each exchange was measured {found.rounds} times, which is too few to know"
            f" how much times vary. Measure at least {ROUNDS} rounds.",
        ),
        (
            found.spread > SPREAD,
            f"Times vary by {found.spread:.0%} from round to round. {busy}",
        ),
        (
            found.median_error > MEDIAN or found.worst_error > WORST,
            "The formula does not describe this network. For example, the network may"
            f" have links of several speeds, or carry other traffic. {busy}",
        ),
        (
            found.wire < WIRE,
            f"The largest exchange spends {found.wire:.0%} of its time on bytes, so"
            " that the bandwidth is uncertain. Measure larger vectors.",
        ),
    ]
    return [reason for failed, reason in checks if failed]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
