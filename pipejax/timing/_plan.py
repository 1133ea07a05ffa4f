"""Plans: ranks ways to train by the time that a step should take.

Several buckets are for synchronous steps only. A train step that the user writes can
exchange each bucket with a `pmean` of its own during the backward pass. Above width 1
there is a single bucket, because its exchange has a whole step of time.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

from pipejax._internal.integers import is_integer
from pipejax.codecs import Codec

from ._checks import check_elements
from ._cluster import Cluster
from ._counts import COST_MODELS, compatible
from ._exchange import Duration
from ._iteration import Compute, overlapped_step_time, synchronous_step_time
from ._leaves import Shapes, square_leaves
from ._rounds import FLOAT32, Chunk
from ._train_config import RankedConfig, TrainConfig

HOSTS = tuple(2**i for i in range(13))  # 1 to 4,096
# Step times that differ by at most this ratio count as equal. The simpler way is then
# ranked first.
SAME = 0.01


def plan(
    cluster: Cluster,
    elements: int,
    compute: Compute,
    codecs: Mapping[str, Codec] | None = None,
    widths: Sequence[int] = (1, 2),
    buckets: Sequence[int] = (1, 4, 16),
    *,
    one_core: bool = False,
    leaves: Shapes | None = None,
    baseline_bytes: int = FLOAT32,
) -> list[RankedConfig]:
    """Ranks every way to train by its step time, the shortest first.

    The ways are all `compatible` combinations of width, algorithm, codec and number of
    buckets. With several hosts of several devices, each algorithm is considered both
    over all devices (`flat`) and between hosts (`hierarchical`).

    Ways whose step times differ by at most 1 % are ranked by simplicity: first the
    smaller width, then fewer buckets, then the codec that drops fewer bits, then the
    number of levels, then fewer encodings of a value in turn, and at last the shorter
    exchange. Precision is therefore not given up without a gain in time. At width 1, an
    algorithm over all devices comes before a hierarchical one. With a delay, it comes
    after it: in two levels, the devices of a host predict by their common mean.

    Args:
      cluster: The cluster with its speeds, including those of all `codecs`.
      elements: The number of float32 elements of a gradient.
      compute: The compute times of a step.
      codecs: The codecs to consider, by their names in `cluster.codecs`, each with
        error feedback if training uses it. Exchanges without a codec are always
        considered.
      widths: The widths to consider.
      buckets: The numbers of buckets to consider at width 1. A codec that needs whole
        leaves has a single bucket.
      one_core: Whether the codec and the additions run on the core that computes the
        model, as on a CPU. They then count as compute at widths above 1.
      leaves: The shapes of the gradient's leaves, on which the payload of `power_sgd`
        depends. `None` assumes those of `pj.timing.square_leaves`.
      baseline_bytes: The bytes of an element in D-Sync, to which gains are relative.
        2 stands for a run whose gradients travel in bfloat16.

    Returns:
      All ways with their step times, and their gains over D-Sync
      (`RankedConfig.gains`).

    Raises:
      ValueError: If a codec has no speed in `cluster.codecs`, `leaves` do not have
        `elements` elements in all, `elements`, a width or a number of buckets is not a
        whole number above 0, `baseline_bytes` is not one from 1 to 4, or a time is not
        finite.

    Examples:
      A gradient of 16 MB on four hosts, with links of 1 Gbit/s and 0.25 s of compute:

      >>> import pipejax as pj
      >>> cluster = pj.timing.Cluster(4, pj.timing.Link(50e-6, 125e6))
      >>> choices = pj.timing.plan(cluster, 4_000_000, pj.timing.Compute.of(0.25))
      >>> print(choices[0].config)
      width 2, halving_doubling, uncompressed
      >>> f"{choices[0].step:.3f} s"
      '0.250 s'
    """
    elements = check_elements("elements", elements)
    known = _known(codecs, elements, leaves)
    configs = [
        TrainConfig(width, algorithm, name, levels, count)
        for (name, codec), algorithm in itertools.product(known.items(), COST_MODELS)
        for levels in _levels(cluster)
        if compatible(algorithm, codec, levels=levels)
        for width in widths
        for count in (buckets if width == 1 else (1,))
        if count == 1 or codec is None or not codec.needs_leaves
    ]
    if not is_integer(baseline_bytes, 1) or baseline_bytes > FLOAT32:
        raise ValueError(
            "`baseline_bytes` must be a whole number from 1 to 4, got"
            f" {baseline_bytes!r}. 4 stands for float32, and 2 for bfloat16."
        )
    dropped = {
        name: 1 - Chunk.of(elements, 1, codec).payload / (FLOAT32 * elements)
        for name, codec in known.items()
    }
    exact = _exact(cluster, -(-elements * baseline_bytes // FLOAT32))
    d_sync = synchronous_step_time(compute, exact)
    beside = overlapped_step_time(compute, exact)
    found = []
    for config in configs:
        exchange = config.exchange(cluster, elements, known[config.codec])
        own = config.own(compute, cluster, elements, one_core=one_core)
        step = config.step(own, exchange, one_core=one_core)
        if not math.isfinite(step):
            raise ValueError(
                "`cluster` must have times, speeds and shares with which every step"
                f" takes a finite time; got {step} s for {config}. Correct what is too"
                f" slow: {cluster!r:.500}"
            )
        found.append(
            RankedConfig(
                config,
                exchange,
                step,
                compute.total,
                d_sync,
                beside,
                dropped[config.codec],
                config.encodings(cluster, elements, known[config.codec]),
                inside=own.inside,
            )
        )
    return ranked(found)


def scaling(
    cluster: Cluster,
    config: TrainConfig,
    elements: int,
    compute: Compute,
    codecs: Mapping[str, Codec] | None = None,
    hosts: Sequence[int] = HOSTS,
    *,
    one_core: bool = False,
    leaves: Shapes | None = None,
) -> dict[int, float]:
    """Returns the scaling efficiency of a way to train, for several numbers of hosts.

    The batch per device is fixed. With c the compute time and t the step time, the
    efficiency is `c / t`: the throughput of p devices, as a share of p times that of
    one device alone.

    Args:
      cluster: The cluster with its speeds. Its number of hosts is not used.
      config: The way to train, for example `plan(...)[0].config`.
      elements: The number of float32 elements of a gradient.
      compute: The compute times of a step.
      codecs: The codecs by name, as in `plan`. They must contain the codec of `config`.
      hosts: The numbers of hosts. The default is the powers of two up to 4,096.
      one_core: Whether codec and additions run on the core of the model, as in `plan`.
      leaves: The shapes of the gradient's leaves, as in `plan`.

    Returns:
      The efficiency by the number of hosts; 1 means that the exchange costs no time.

    Raises:
      ValueError: If `codecs` do not contain the codec of `config`, `leaves` do not have
        `elements` elements in all, `compute` takes no time, or a number is not a whole
        number above 0.

    Examples:
      >>> import pipejax as pj
      >>> cluster = pj.timing.Cluster(4, pj.timing.Link(50e-6, 125e6))
      >>> compute, config = pj.timing.Compute.of(0.25), pj.timing.TrainConfig(1, "ring")
      >>> curve = pj.timing.scaling(cluster, config, 4_000_000, compute, hosts=(1, 4))
      >>> {hosts: round(share, 2) for hosts, share in curve.items()}
      {1: 1.0, 4: 0.57}
    """
    elements = check_elements("elements", elements)
    known = _known(codecs, elements, leaves)
    if config.codec not in known:
        raise ValueError(
            f"`codecs` must contain the codec of `config`, {config.codec!r}; got"
            f" {sorted(codecs or {})}. Give the codecs that `plan` was given."
        )
    if not compute.total:
        raise ValueError(
            "`compute` must take time, of which the efficiency is a share; got 0"
            " seconds. Give the times of a step."
        )
    curve = {}
    for count in hosts:
        many = dataclasses.replace(cluster, hosts=count)
        exchange = config.exchange(many, elements, known[config.codec])
        own = config.own(compute, many, elements, one_core=one_core)
        step = config.step(own, exchange, one_core=one_core)
        curve[count] = compute.total / step
    return curve


def _levels(cluster: Cluster) -> tuple[bool, ...]:
    several = cluster.devices > 1 and cluster.hosts > 1
    return (False, True) if several else (False,)


def _exact(cluster: Cluster, elements: int) -> Duration:
    """Returns the duration of the fastest exchange without a codec."""
    configs = [
        TrainConfig(1, algorithm, levels=levels)
        for algorithm in COST_MODELS
        for levels in _levels(cluster)
    ]
    exchanges = [config.exchange(cluster, elements, None) for config in configs]
    return min(exchanges, key=lambda exchange: exchange.total)


def _known(
    codecs: Mapping[str, Codec] | None, elements: int, leaves: Shapes | None
) -> dict[str | None, Codec | None]:
    """Returns the codecs by name, adapted to the leaves, and `None` for no codec."""
    shapes = square_leaves(elements) if leaves is None else leaves
    there = sum(map(math.prod, shapes))
    if there != elements:
        raise ValueError(
            f"`leaves` must have the {elements} elements of the gradient; got shapes"
            f" with {there} elements. Give the shapes of all leaves."
        )
    found: dict[str | None, Codec | None] = {None: None}
    found |= {name: codec.of(shapes) for name, codec in (codecs or {}).items()}
    return found


def ranked(choices: Sequence[RankedConfig]) -> list[RankedConfig]:
    """Sorts by step time, and by simplicity where step times count as equal.

    The mean inside hosts does not count: it makes predictions better.
    """

    def seconds(choice: RankedConfig) -> float:
        return choice.step - choice.inside

    def simplicity(choice: RankedConfig) -> tuple[float, ...]:
        config, total = choice.config, choice.exchange.total
        steps = config.width, config.sync_every, config.buckets
        # Without a delay, one level is simpler. With one, devices of a host predict by
        # their common mean in an exchange of two.
        worse = config.levels == (config.width == 1)
        return *steps, choice.dropped, worse, choice.encodings, total

    # Each group reaches from its fastest way to ways that are 1 % slower. A chain of
    # nearly equal ways is therefore cut, and never spans more than that.
    left, found = sorted(choices, key=seconds), []
    while left:
        end = seconds(left[0]) * (1 + SAME)
        same = [choice for choice in left if seconds(choice) <= end]
        found += sorted(same, key=simplicity)
        left = left[len(same) :]
    return found
