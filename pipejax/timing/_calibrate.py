"""Calibration: measures the speeds of the cluster that the program runs on.

All hosts measure at the same time, so that processes that share a core are measured
while they share it.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from pipejax import collectives
from pipejax.codecs import Codec

from ._cluster import CodecSpeed
from ._counts import COST_MODELS
from ._exchange import ExchangeCounts, through_one_link
from ._fit import Fit, Sample, fit, fit_inner
from ._leaves import square_leaves
from ._rounds import FLOAT32, ROUNDS, Algorithm
from ._stopwatch import Case, check_several, exchange_times, in_turn

SIZES = (2**12, 2**16, 2**18, 2**20, 2**21)
"""The vector sizes that `calibrate` exchanges by default, in elements of float32."""
# All but the parameter server, whose link carries the vectors of all hosts.
ALGORITHMS = tuple(name for name in ROUNDS if name != "parameter_server")


def calibrate(
    mesh: Mesh,
    codecs: Mapping[str, Codec] | None = None,
    sizes: Sequence[int] = SIZES,
    rounds: int = 7,
) -> Fit:
    """Measures the speeds of the cluster that this program runs on.

    Every process of the program must call this function. It works as follows:

    1. Time `psum`, `ring`, `two_shot`, `halving_doubling` and `tree` between hosts,
       without a codec, for each size. The devices of a host exchange at the same time,
       and share its link.
    2. Time an addition, and encoding and decoding with each codec, on one device of
       each host and without communication.
    3. Fit latency, bandwidth, shares and synchronisation to the exchange times; see
       `pj.timing.fit`.
    4. With several devices on each host, time the same inside hosts, and fit the
       latency and bandwidth of `Cluster.inner`.

    Pass the result to `pj.timing.trust` to learn whether its predictions can be relied
    on.

    Args:
      mesh: A mesh with one device of each host, or with an axis of hosts and one of the
        devices of each, as `pj.data_mesh(axis_name=("host", "device"))` makes.
      codecs: The codecs whose speed is measured, under the names that they get in
        `Cluster.codecs`.
      sizes: The lengths of the vectors that are exchanged, in elements of float32. Give
        at least two. Codecs and the addition are timed at about the largest one.
      rounds: The number of times that each exchange and each codec is measured. The fit
        uses the medians.

    Returns:
      The cluster with its fitted speeds, and the samples between hosts that they were
      fitted to.

    Raises:
      ValueError: If `mesh` has a single device or host, which exchanges nothing, or if
        `sizes` are too few to tell latency from bandwidth.
    """
    check_several(mesh)
    between, *inside = mesh.axis_names
    hosts, devices = mesh.shape[between], math.prod(mesh.shape[x] for x in inside)
    if hosts == 1 or len(inside) > 1:
        raise ValueError(
            "`mesh` must have one axis, or an axis of several hosts and one of the"
            f" devices of each; got {dict(mesh.shape)}. On one host, call"
            " pj.data_mesh() for a mesh that takes each device for a host."
        )
    samples = _samples(mesh, between, sizes, rounds, sharing=devices)
    reduction, speeds = core_speeds(mesh, codecs or {}, max(sizes), rounds)
    found = fit(hosts, samples, reduction, speeds)
    if devices == 1:
        return found
    within = [
        (sample.exchange.between, sample.seconds)
        for sample in _samples(mesh, inside[0], sizes, rounds)
    ]
    inner = fit_inner(found.cluster, devices, within)
    return found._replace(
        cluster=dataclasses.replace(found.cluster, devices=devices, inner=inner)
    )


def _samples(
    mesh: Mesh, axis_name: str, sizes: Sequence[int], rounds: int, sharing: int = 1
) -> tuple[Sample, ...]:
    """Measures exchanges along an axis, where so many devices share a link."""
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
        axis_name=axis_name,
    )

    def counts(algorithm: Algorithm, n: int) -> ExchangeCounts:
        own = COST_MODELS[algorithm](mesh.shape[axis_name], n, None)
        return ExchangeCounts(through_one_link(own, sharing))

    return tuple(
        Sample(name, counts(algorithm, n), tuple(times[name]), n)
        for name, (algorithm, n) in cases.items()
    )


def core_speeds(
    mesh: Mesh, codecs: Mapping[str, Codec], elements: int, rounds: int
) -> tuple[float, dict[str, CodecSpeed]]:
    """Measures how fast a device adds float32, and how fast each codec is.

    One device of each host works, on all hosts at the same time.
    """
    x = jnp.arange(elements, dtype=jnp.float32)
    work, sizes = {"add": _call(jnp.add, x, x)}, {"add": elements}
    for name, codec in codecs.items():
        # Whole blocks only, so that the codec need not pad.
        n = codec.multiple * max(1, elements // codec.multiple)
        codec = codec.of(square_leaves(n))
        x = jax.random.normal(jax.random.key(0), (n,))
        state = codec.init(n, jnp.uint32(0))
        payload, _ = codec.encode(x, state)
        work[f"encode {name}"] = _call(codec.encode, x, state)
        work[f"decode {name}"] = _call(partial(codec.decode, n=n), payload)
        sizes |= {f"encode {name}": n, f"decode {name}": n}
    times = in_turn(mesh, work, rounds)
    speed = {k: FLOAT32 * n / statistics.median(times[k]) for k, n in sizes.items()}
    return speed["add"], {
        name: CodecSpeed(speed[f"encode {name}"], speed[f"decode {name}"])
        for name in codecs
    }


def _call(function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    compiled = jax.jit(function)
    return lambda: jax.block_until_ready(compiled(*args))
