"""A cluster's speeds, fitted to what was measured on it.

`seconds = messages alpha + (wire + (1/share - 1) bytes that share) beta
+ collectives S + what cores do`, with a share for each kind of exchange
(`pj.timing.Shares`), by least squares of logarithms over algorithms and sizes: a
millisecond counts as much of ten as a second of ten thousand, a time that varied from
round to round less than one that did not, and an outlier little.
"""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ._cluster import Cluster, CodecSpeed, Link, Shares
from ._exchange import Exchange, duration

COSTS = ("messages", "collectives", "wire", "paired", "shifted", "shuffled")
# The relative error of a model of so few numbers, beside that of what is measured.
MODEL = 0.05


class Sample(NamedTuple):
    """One exchange, counted and measured.

    Attributes:
      name: of it.
      exchange: what it asks.
      times: seconds that it took, by round.
      elements: of the vector, float32; `None` where that is not known.
    """

    name: str
    exchange: Exchange
    times: tuple[float, ...]
    elements: int | None = None

    @property
    def seconds(self) -> float:
        """The median of the times."""
        return statistics.median(self.times)

    @property
    def spread(self) -> float:
        """Of the times' logarithms, the standard deviation; 0 of a single one."""
        return float(np.std(np.log(self.times)))


class Fit(NamedTuple):
    """A cluster, and how well it says what was measured.

    Attributes:
      cluster: its speeds.
      samples: what they were fitted to.
    """

    cluster: Cluster
    samples: tuple[Sample, ...]

    @property
    def predicted(self) -> tuple[float, ...]:
        """Seconds of each sample, by the model."""
        return tuple(duration(self.cluster, s.exchange).total for s in self.samples)

    @property
    def errors(self) -> tuple[float, ...]:
        """`predicted / measured - 1` of each sample."""
        pairs = zip(self.predicted, self.samples, strict=True)
        return tuple(seconds / sample.seconds - 1 for seconds, sample in pairs)

    def __str__(self) -> str:
        link, shares = self.cluster.link, dataclasses.asdict(self.cluster.shares)
        parts = ", ".join(f"{share:.2f} of it {name}" for name, share in shares.items())
        lines = [
            f"latency {1e6 * link.latency:.0f} us, bandwidth"
            f" {8e-6 * link.bandwidth:.0f} Mbit/s ({parts}), synchronisation"
            f" {1e6 * self.cluster.synchronisation:.0f} us, sums"
            f" {1e-9 * self.cluster.reduction:.1f} GB/s",
            *(
                f"{name}: encodes {1e-9 * speed.encode:.1f}, decodes"
                f" {1e-9 * speed.decode:.1f} GB/s of float32"
                for name, speed in self.cluster.codecs.items()
            ),
            f"{'':<28}{'measured':>12}{'predicted':>12}",
        ]
        rows = zip(self.samples, self.predicted, self.errors, strict=True)
        return "\n".join(
            [
                *lines,
                *(
                    f"{sample.name:<28}{1e3 * sample.seconds:9.3f} ms"
                    f"{1e3 * seconds:9.3f} ms {100 * error:+6.0f} %"
                    for sample, seconds, error in rows
                ),
            ]
        )


def fit(
    hosts: int,
    samples: Sequence[Sample],
    reduction: float,
    codecs: Mapping[str, CodecSpeed] | None = None,
) -> Fit:
    """Latency, bandwidth, shares and synchronisation of a cluster, one device a host.

    A kind of exchange that no sample is of has all of the bandwidth.

    Args:
      hosts: how many.
      samples: without a codec, of several sizes and algorithms.
      reduction: bytes of float32 added a second.
      codecs: how fast they are; kept.

    Raises:
      ValueError: for samples that do not tell these apart.
    """
    from scipy.optimize import least_squares  # slow to import

    seconds = np.array([sample.seconds for sample in samples])
    sigma = np.hypot(MODEL, [sample.spread for sample in samples])
    counts = [sample.exchange.between for sample in samples]
    added = np.array([c.summed for c in counts]) / reduction
    asked = np.array([[getattr(c, name) for name in COSTS] for c in counts])
    asked = asked.reshape(-1, len(COSTS))
    size = asked.max(axis=0, initial=0)
    seen = np.flatnonzero(size)
    rank = np.linalg.matrix_rank(asked[:, seen] / size[seen])
    if rank < seen.size or not size[:3].all():
        raise ValueError(
            "`samples` must be of several sizes, and of algorithms with different"
            " numbers of messages, collectives and bytes both ways; got"
            f" {[s.name for s in samples]}."
        )

    def costs(x: np.ndarray) -> np.ndarray:
        """Of each of COSTS, above 0; of the last three, beside the byte's own."""
        cost = np.zeros(len(COSTS))
        cost[seen] = np.exp(x)
        cost[3:] *= cost[2]
        return cost

    def errors(x: np.ndarray) -> np.ndarray:
        return np.log((added + asked @ costs(x)) / seconds) / sigma

    # From what it would be if all of the largest one's time were of one kind.
    start = np.log(seconds.max() / size[seen])
    start[3:] = 0.0
    found = least_squares(errors, start, loss="soft_l1", f_scale=2)
    latency, synchronisation, beta, *waits = (float(cost) for cost in costs(found.x))
    cluster = Cluster(
        hosts,
        Link(latency, 1 / beta),
        shares=Shares(*(beta / (beta + wait) for wait in waits)),
        reduction=reduction,
        synchronisation=synchronisation,
        codecs=dict(codecs or {}),
    )
    return Fit(cluster, tuple(samples))
