"""A cluster's speeds, fitted to what was measured on it.

`seconds = messages alpha + (wire + (1/duplex - 1) mutual) beta + collectives S
+ what cores do`, by least squares
of logarithms over algorithms and sizes, so that a millisecond counts as much of ten as
a second of ten thousand, and an outlier little. What cores do, encode, decode and add,
is measured apart from the network, on all hosts at once, so that those that share a
core do.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.optimize
import scipy.special
from jax.sharding import Mesh

from pipejax import collectives
from pipejax.codecs import Codec

from ._cluster import Cluster, CodecSpeed, Link
from ._counts import FLOAT32, FORMS, Algorithm
from ._exchange import Exchange, duration
from ._stopwatch import Case, check_several, exchange_times

SIZES = (2**10, 2**14, 2**17, 2**19, 2**21)
ALGORITHMS: tuple[Algorithm, ...] = (
    "psum",
    "ring",
    "two_shot",
    "halving_doubling",
    "tree",
)


class Sample(NamedTuple):
    """One exchange, counted and measured.

    Attributes:
      name: of it.
      exchange: what it asks.
      seconds: that it took.
    """

    name: str
    exchange: Exchange
    seconds: float


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
        link = self.cluster.link
        lines = [
            f"latency {1e6 * link.latency:.0f} us, bandwidth"
            f" {8e-6 * link.bandwidth:.0f} Mbit/s"
            f" ({self.cluster.duplex:.2f} of it both ways at once), synchronisation"
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


def calibrate(
    mesh: Mesh,
    codecs: Mapping[str, Codec] | None = None,
    sizes: Sequence[int] = SIZES,
    rounds: int = 7,
) -> Fit:
    """Measures the cluster that this runs on; all its processes must call it.

    Args:
      mesh: of one device a host.
      codecs: whose speed to measure, by name.
      sizes: elements of the vectors that are exchanged.
      rounds: how often each; medians count.

    Raises:
      ValueError: for a mesh of one device, which exchanges nothing.
    """
    check_several(mesh)
    cases = {
        f"{algorithm} {n}": (algorithm, n) for algorithm in ALGORITHMS for n in sizes
    }
    times = exchange_times(
        mesh,
        {
            name: Case(getattr(collectives, algorithm)(), n)
            for name, (algorithm, n) in cases.items()
        },
        rounds,
    )
    samples = tuple(
        Sample(
            name,
            Exchange(FORMS[algorithm](mesh.size, n, None)),
            statistics.median(times[name]),
        )
        for name, (algorithm, n) in cases.items()
    )
    speeds = {
        name: codec_speed(codec, max(sizes), rounds)
        for name, codec in (codecs or {}).items()
    }
    return fit(mesh.size, samples, reduction_speed(max(sizes), rounds), speeds)


def fit(
    hosts: int,
    samples: Sequence[Sample],
    reduction: float,
    codecs: Mapping[str, CodecSpeed] | None = None,
) -> Fit:
    """Latency, bandwidth, duplex and synchronisation of a cluster, one device a host.

    Args:
      hosts: how many.
      samples: without a codec, of several sizes and algorithms.
      reduction: bytes of float32 added a second.
      codecs: how fast they are; kept.

    Raises:
      ValueError: for samples that do not tell these apart.
    """
    counts = [sample.exchange.between for sample in samples]
    seconds = np.array([sample.seconds for sample in samples])
    added = np.array([c.summed for c in counts]) / reduction
    asked = np.array([(c.messages, c.wire, c.mutual, c.collectives) for c in counts])
    asked = asked.reshape(-1, 4)
    size = asked.max(axis=0, initial=0)
    if not size.all() or np.linalg.matrix_rank(asked / size) < 4:
        raise ValueError(
            "`samples` must be of several sizes, and of algorithms with different"
            " numbers of messages, collectives and bytes both ways; got"
            f" {[s.name for s in samples]}."
        )

    def costs(x: np.ndarray) -> np.ndarray:
        """Of each column: all above 0, a mutual byte at most as much as another."""
        latency, beta, share, synchronisation = x
        both = np.exp(beta) * scipy.special.expit(share)
        return np.array([np.exp(latency), np.exp(beta), both, np.exp(synchronisation)])

    def errors(x: np.ndarray) -> np.ndarray:
        return np.log((added + asked @ costs(x)) / seconds)

    # From what it would be if all of the largest one's time were of one kind.
    start = np.log(seconds.max() / size)
    start[2] = 0.0
    found = scipy.optimize.least_squares(errors, start, loss="soft_l1", f_scale=0.1)
    latency, beta, both, synchronisation = (float(cost) for cost in costs(found.x))
    cluster = Cluster(
        hosts,
        Link(latency, 1 / beta),
        duplex=1 / (1 + both / beta),
        reduction=reduction,
        synchronisation=synchronisation,
        codecs=dict(codecs or {}),
    )
    return Fit(cluster, tuple(samples))


def reduction_speed(elements: int, rounds: int) -> float:
    """Bytes of float32 that this device adds to others a second."""
    x = jnp.arange(elements, dtype=jnp.float32)
    return FLOAT32 * elements / _median(rounds, jax.jit(jnp.add), x, x)


def codec_speed(codec: Codec, elements: int, rounds: int) -> CodecSpeed:
    """How fast this device encodes and decodes vectors of about so many elements."""
    n = codec.multiple * max(1, elements // codec.multiple)
    x = jax.random.normal(jax.random.key(0), (n,))
    state = codec.init(n, jnp.uint32(0))
    payload, _ = codec.encode(x, state)
    encode = _median(rounds, jax.jit(codec.encode), x, state)
    decode = _median(rounds, jax.jit(lambda p: codec.decode(p, n)), payload)
    return CodecSpeed(FLOAT32 * n / encode, FLOAT32 * n / decode)


def _median(rounds: int, function: Callable[..., Any], *args: Any) -> float:
    jax.block_until_ready(function(*args))  # compile
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready(function(*args))
        times.append(time.perf_counter() - start)
    return statistics.median(times)
