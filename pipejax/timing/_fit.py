"""The speeds of a cluster, fitted to exchange times that were measured on it.

The fit minimises the errors of log t over algorithms and sizes by least squares. An
error of 1 ms in 10 ms therefore counts as much as an error of 1 s in 10 s. A time that
varies from one measurement round to the next counts less than a steady time. Outliers
count little, because the loss grows only linearly for large errors.
"""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ._cluster import Cluster, CodecSpeed, Link, Shares
from ._counts import SENT, Counts
from ._exchange import ExchangeCounts, duration

COSTS = ("messages", "collectives", *SENT)
# The relative error expected of a model with so few numbers. The spread of the measured
# times comes on top.
MODEL = 0.05


class Sample(NamedTuple):
    """The counts of one exchange, and the times that were measured for it.

    Attributes:
      name: The name of the exchange in reports.
      exchange: The counts of the exchange.
      times: The seconds that it took in each measurement round.
      elements: The length of the vector in elements of float32; `None` if unknown.
    """

    name: str
    exchange: ExchangeCounts
    times: tuple[float, ...]
    elements: int | None = None

    @property
    def seconds(self) -> float:
        """The median of the times, in seconds."""
        return statistics.median(self.times)

    @property
    def spread(self) -> float:
        """The standard deviation of the logarithms of the times; 0 for a single time.

        It is about the relative standard deviation of the times.
        """
        return float(np.std(np.log(self.times)))


class Fit(NamedTuple):
    """A fitted cluster, with the samples that it was fitted to.

    `str(fit)` is a table of the speeds and of measured and predicted times.

    Attributes:
      cluster: The cluster with its fitted speeds.
      samples: The samples that the speeds were fitted to.
    """

    cluster: Cluster
    samples: tuple[Sample, ...]

    @property
    def predicted(self) -> tuple[float, ...]:
        """The seconds that the model predicts for each sample."""
        return tuple(duration(self.cluster, s.exchange).total for s in self.samples)

    @property
    def errors(self) -> tuple[float, ...]:
        """The relative error of each sample, `predicted / measured - 1`."""
        pairs = zip(self.predicted, self.samples, strict=True)
        return tuple(seconds / sample.seconds - 1 for seconds, sample in pairs)

    @property
    def speeds(self) -> str:
        """The speeds of the cluster in words, one line for the links and each codec."""
        link, shares = self.cluster.link, dataclasses.asdict(self.cluster.shares)
        parts = ", ".join(f"{share:.2f} of it {name}" for name, share in shares.items())
        lines = [
            f"latency {1e6 * link.latency:.0f} us, bandwidth"
            f" {8e-6 * link.bandwidth:.0f} Mbit/s ({parts}), synchronisation"
            f" {1e6 * self.cluster.synchronisation:.0f} us, sums"
            f" {1e-9 * self.cluster.reduction:.1f} GB/s",
            *self._inside(),
            *(
                f"{name}: encodes {1e-9 * speed.encode:.1f}, decodes"
                f" {1e-9 * speed.decode:.1f} GB/s of float32"
                for name, speed in self.cluster.codecs.items()
            ),
        ]
        return "\n".join(lines)

    def _inside(self) -> list[str]:
        inner, devices = self.cluster.inner, self.cluster.devices
        if inner is None:
            return []
        return [
            f"inside a host, between {devices} devices: latency"
            f" {1e6 * inner.latency:.0f} us, bandwidth"
            f" {1e-9 * inner.bandwidth:.1f} GB/s"
        ]

    def __str__(self) -> str:
        rows = zip(self.samples, self.predicted, self.errors, strict=True)
        return "\n".join(
            [
                self.speeds,
                f"{'':<28}{'measured':>12}{'predicted':>12}",
                *(
                    f"{sample.name:<28}{1e3 * sample.seconds:9.3f} ms"
                    f"{1e3 * seconds:9.3f} ms {100 * error:+6.0f} %"
                    for sample, seconds, error in rows
                ),
            ]
        )


def fit_inner(
    cluster: Cluster, devices: int, samples: Sequence[tuple[Counts, float]]
) -> Link:
    """Fits the link inside hosts to the seconds of exchanges there.

    Shares and synchronisation are those of the cluster, with which `duration` counts
    exchanges inside hosts, too.
    """
    from scipy.optimize import least_squares  # slow to import

    seconds = np.array([each for _, each in samples])

    def link(x: np.ndarray) -> Link:
        return Link(*np.exp(x).tolist())

    def errors(x: np.ndarray) -> np.ndarray:
        there = dataclasses.replace(cluster, devices=devices, inner=link(x))
        found = [
            duration(there, ExchangeCounts(Counts(), counts)).total
            for counts, _ in samples
        ]
        return np.log(np.array(found) / seconds)

    # A link far faster than its bytes were seen to travel is as good as one without
    # limits, where launches take all of the time.
    fastest = max(counts.wire / each for counts, each in samples)
    bounds = np.log([[1e-9, fastest / 2], [max(seconds), 10 * fastest]])
    start = np.log([min(seconds) / 10, fastest])
    return link(least_squares(errors, start, bounds=bounds, loss="soft_l1").x)


def fit(
    hosts: int,
    samples: Sequence[Sample],
    reduction: float,
    codecs: Mapping[str, CodecSpeed] | None = None,
) -> Fit:
    r"""Fits latency, bandwidth, shares and synchronisation to measured exchange times.

    The model is that of `pj.timing.duration`. With m messages, k collectives, a bytes
    added and b bytes on the wire, `b_i` of them in the communication pattern with the
    share `s_i` (`pj.timing.Shares`), an exchange takes

    $$t = m \alpha + k S + (b + \sum_i (1/s_i - 1) b_i) \beta + a \gamma$$

    seconds. The fit finds the latency `alpha`, the synchronisation S, the bandwidth
    `1 / beta` and the shares `s_i`. It minimises the relative errors of all samples by
    robust least squares. A sample whose times vary counts less.
    `pj.timing.calibrate` measures the samples and fits them in one call.

    Args:
      hosts: The number of hosts, each with one device.
      samples: Exchanges without a codec, of several sizes and algorithms. The share of
        a communication pattern that no sample has is 1.
      reduction: `1 / gamma`, the bytes of float32 that a device adds per second.
      codecs: The speeds of codecs, which the fitted cluster gets unchanged.

    Returns:
      The fitted cluster, with one device per host, and the samples.

    Raises:
      ValueError: If the samples cannot tell the costs apart, because they have too few
        sizes or algorithms.

    Examples:
      Times that are computed from a bandwidth of 500 Mbit/s give it back:

      >>> import pipejax as pj
      >>> from pipejax.timing import COST_MODELS, Cluster, ExchangeCounts, Link
      >>> from pipejax.timing import Sample, Shares
      >>> shares = Shares(pair=0.6, shift=0.9, shuffle=0.7)
      >>> link = Link(2e-4, 62.5e6)
      >>> known = Cluster(4, link, synchronisation=5e-4, shares=shares)
      >>> samples = []
      >>> for name, form in COST_MODELS.items():
      ...     for n in (2**10, 2**14, 2**18, 2**22):
      ...         exchange = ExchangeCounts(form(4, n, None))
      ...         seconds = pj.timing.duration(known, exchange).total
      ...         samples.append(Sample(name, exchange, (seconds,)))
      >>> link = pj.timing.fit(4, samples, known.reduction).cluster.link
      >>> f"{8e-6 * link.bandwidth:.0f} Mbit/s"
      '500 Mbit/s'
    """
    from scipy.optimize import least_squares  # slow to import

    seconds = np.array([sample.seconds for sample in samples])
    # The errors of the model and of the measurement are independent: their squares add
    # up.
    sigma = np.hypot(MODEL, [sample.spread for sample in samples])
    counts = [sample.exchange.between for sample in samples]
    added = np.array([c.summed for c in counts]) / reduction
    asked = np.array([[getattr(c, name) for name in COSTS] for c in counts])
    asked = asked.reshape(-1, len(COSTS))
    size = asked.max(axis=0, initial=0)
    seen = np.flatnonzero(size)
    # Scaled to a maximum of 1, since messages are few and bytes are millions.
    rank = np.linalg.matrix_rank(asked[:, seen] / size[seen])
    if rank < seen.size or not size[:3].all():
        raise ValueError(
            "`samples` must have several sizes, and algorithms that differ in messages,"
            " collectives and bytes sent while receiving; got"
            f" {[s.name for s in samples]}. For example, measure psum, ring, two_shot,"
            " halving_doubling and tree with two sizes each."
        )

    def costs(x: np.ndarray) -> np.ndarray:
        """Returns the seconds per unit of each of COSTS, 0 for what no sample has."""
        cost = np.zeros(len(COSTS))
        # The search is over logarithms, which keeps all costs above 0.
        cost[seen] = np.exp(x)
        # The last three are extra seconds per byte. Their entries of x are relative to
        # the seconds for a byte on the wire.
        cost[3:] *= cost[2]
        return cost

    def errors(x: np.ndarray) -> np.ndarray:
        """Returns the errors of log t, in units of their expected size."""
        return np.log((added + asked @ costs(x)) / seconds) / sigma

    # Start from the costs that would each explain the longest time alone. Start from
    # shares of 1/2.
    start = np.log(seconds.max() / size[seen])
    start[3:] = 0.0
    # Errors count as squares up to about 2 sigma, and linearly beyond.
    found = least_squares(errors, start, loss="soft_l1", f_scale=2)
    latency, synchronisation, beta, *waits = (float(cost) for cost in costs(found.x))
    cluster = Cluster(
        hosts,
        Link(latency, 1 / beta),
        # A byte takes beta, and wait more while the device also receives.
        shares=Shares(*(beta / (beta + wait) for wait in waits)),
        reduction=reduction,
        synchronisation=synchronisation,
        codecs=dict(codecs or {}),
    )
    return Fit(cluster, tuple(samples))
