"""How fast codecs are, beside a copy of the same array."""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.codec_speed import CODECS

from ._arrays import is_small

CALLS = 10  # dispatched before one waits, so that launching costs nothing


def measured() -> dict[str, Any]:
    """Returns the GB/s that each codec reads and writes, and their share of a copy."""
    mebibytes, rounds = (1, 3) if is_small() else (256, 9)
    n = mebibytes * 2**18
    x = jnp.asarray(np.random.default_rng(0).normal(size=n).astype(np.float32))
    runs, moved = {"copy": _timed(jnp.copy, x)}, {"copy": 8 * n}
    for name, make in CODECS.items():
        codec = make()
        state = codec.init(n, jnp.uint32(0))
        payload, _ = jax.jit(codec.encode)(x, state)
        decode = functools.partial(codec.decode, n=n)
        for way, run in (
            ("encode", _timed(codec.encode, x, state)),
            ("decode", _timed(decode, payload)),
        ):
            runs[f"{name}, {way}"] = run
            moved[f"{name}, {way}"] = 4 * n + codec.size(n)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(run())
    speeds = {
        name: moved[name] / statistics.median(values) / 1e9
        for name, values in times.items()
    }
    return {
        name: {
            "gigabytes_per_second": speed,
            "of_the_copy": speed / speeds["copy"],
            "quartiles_ms": [1e3 * q for q in statistics.quantiles(times[name], n=4)],
        }
        for name, speed in speeds.items()
    }


def _timed(function: Callable[..., Any], *args: Any) -> Callable[[], float]:
    compiled = jax.jit(function)
    jax.block_until_ready(compiled(*args))

    def run() -> float:
        start = time.perf_counter()
        jax.block_until_ready([compiled(*args) for _ in range(CALLS)])
        return (time.perf_counter() - start) / CALLS

    return run
