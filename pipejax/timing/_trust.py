"""Whether what a fit predicts can be relied on.

A model's gradient takes as long to exchange as the longest of what was measured, or
longer. So a fit is judged by these, the long ones: those that take at least a tenth of
the longest. Of the nine fits in experiments/results/prediction.json the long ones are
off by at most 9 % in the median and 30 % at worst, vary by at most 12 % from round to
round, and what they predict of other exchanges is off by 5 to 15 % in the median. That
is where the limits here come from. Short exchanges are mostly what no formula knows,
threads that wake up late and bursts: their error is told, and not judged.
"""

import statistics
from typing import Any, NamedTuple

from ._exchange import duration
from ._fit import Fit

LONG = 0.1
"""Share of the longest time from which an exchange counts as long."""
MEDIAN, WORST, SPREAD, ROUNDS, WIRE = 0.10, 0.35, 0.20, 3, 0.5
"""Limits: at most, at most, at most, at least, at least."""


class Trust(NamedTuple):
    """What a fit's residuals, repeats and sizes say of it.

    Attributes:
      reasons: why it cannot be trusted, each with a remedy; none if it can.
      rounds: how often each exchange was measured, at the least.
      spread: standard deviation of a long exchange's times, relative; their median.
      median_error: of the long exchanges, `|predicted / measured - 1|`.
      worst_error: of the long exchanges.
      worst: name of that exchange.
      short: seconds below which an exchange is short.
      short_error: worst error of the short exchanges; 0 without any.
      wire: share of the largest exchange's time that is spent on its bytes.
      largest: elements of the largest vector measured; `None` where not known.
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
        """Whether nothing speaks against the fit."""
        return not self.reasons

    def to_dict(self) -> dict[str, Any]:
        """All of it and the verdict, in types that JSON has."""
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
        if self.trusted:
            return f"This fit can be trusted. {figures}"
        return " ".join(["This fit cannot be trusted.", *self.reasons, figures])


def trust(fit: Fit) -> Trust:
    """Judges a fit by its residuals, its repeats, and the sizes that were measured.

    A fit can be trusted if its exchanges of at least a tenth of the longest time are
    predicted to 10 % in the median and 35 % at worst; were measured at least 3 times,
    with a relative standard deviation of at most 20 % in the median; and if the largest
    of them spends half of its time on bytes, so that larger ones follow from it.

    Args:
      fit: of at least one sample.
    """
    limit = LONG * max(sample.seconds for sample in fit.samples)
    pairs = list(zip(map(abs, fit.errors), fit.samples, strict=True))
    long = [pair for pair in pairs if pair[1].seconds >= limit]
    worst_error, worst = max(long, key=lambda pair: pair[0])
    found = Trust(
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
    """Share of bytes in the time of the exchange that has most of them."""
    largest = max(fit.samples, key=lambda sample: sample.exchange.between.wire)
    parts = duration(fit.cluster, largest.exchange)
    return parts.wire / parts.total


def _reasons(found: Trust) -> list[str]:
    busy = "Measure again while nothing else runs on the hosts and their network."
    checks = [
        (
            found.rounds < ROUNDS,
            f"Each exchange was measured {found.rounds} times, so that it is not known"
            f" how much times vary: measure at least {ROUNDS} rounds.",
        ),
        (
            found.spread > SPREAD,
            f"Times vary by {found.spread:.0%} from round to round. {busy}",
        ),
        (
            found.median_error > MEDIAN or found.worst_error > WORST,
            "The formula does not describe this network: it has links of several"
            f" speeds, say, or other traffic. {busy}",
        ),
        (
            found.wire < WIRE,
            f"The largest exchange spends {found.wire:.0%} of its time on bytes, so"
            " that the bandwidth is a guess: measure larger vectors.",
        ),
    ]
    return [reason for failed, reason in checks if failed]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
