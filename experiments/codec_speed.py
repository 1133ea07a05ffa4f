"""Measures how fast codecs are on one CPU core, relative to a copy of the same array.

Bars: relative to the copy, the speeds of int8 and int4 are at least 0.70, and those of
truncate and bf16 at least 0.80, both for encoding and for decoding. A program that only
reads and writes memory cannot be faster than the copy, which reads 64 MiB and writes 64
MiB. In the result file, `bytes moved` is the number of bytes that a codec reads and
writes.

Memory management decides the speed. XLA:CPU allocates memory for each result anew, and
with pages of 4 KiB the kernel takes longer to provide this memory than the copy takes
to fill it. Everything is therefore measured twice: with huge pages, which
`GLIBC_TUNABLES=glibc.malloc.hugetlb=1` in the environment requests, and without.

Command: python -m experiments.codec_speed
Time: about 2 minutes, on one core.
Result: experiments/results/codec_speed.json
"""

import dataclasses
import functools
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from pipejax import codecs

from . import report

CODECS: dict[str, Callable[[], codecs.Codec]] = {
    "truncate": codecs.truncate,
    "bf16": codecs.bf16,
    "int8, block 64": lambda: codecs.int8(64),
    "int8, block 256": codecs.int8,
    "int8, block 1024": lambda: codecs.int8(1024),
    "int4": codecs.int4,
    "fp4": codecs.fp4,
    "int2": codecs.int2,
    "fp8 e4m3": codecs.fp8,
    "quantize": codecs.quantize,
    "sign": codecs.sign,
    "int8, fed back": lambda: codecs.error_feedback(codecs.int8()),
}
HUGE = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the measurement."""

    mebibytes: int = 64
    """Size of the array, in MiB of float32."""
    rounds: int = 25
    """Number of rounds. Each round runs everything once, in random order."""
    core: int = 0
    """Index of the CPU core to run on."""
    seed: int = 0
    """Seed of the array and of the order in each round."""
    child: bool = False
    """Measure in this process and print JSON: the program calls itself with this."""
    out: pathlib.Path = report.RESULTS / "codec_speed.json"
    """File to write the result to, as JSON."""


def main(config: Config) -> None:
    """Measures in one process for each page size, and writes the result file."""
    if config.child:
        print(json.dumps(measured(config)))
        return
    jax.config.update("jax_platforms", "cpu")
    found = {
        pages: child(config, extra)
        for pages, extra in {"huge pages": HUGE, "small pages": {}}.items()
    }
    report.save(
        config.out,
        **report.settings(config),
        limit="the copy: 1.00",
        pages=found,
    )
    report.console(width=100).print(report.table("of the copy", table(found)))


def child(config: Config, extra: dict[str, str]) -> dict[str, Any]:
    """Returns the figures of a process that runs on one core, with one thread."""
    # XLA reads its number of threads from NPROC when it starts.
    env = {**os.environ, "NPROC": "1", "JAX_PLATFORMS": "cpu"}
    env.pop("GLIBC_TUNABLES", None)
    options = (f"--{name}={getattr(config, name)}" for name in _PASSED)
    command = [sys.executable, "-m", "experiments.codec_speed", "--child", *options]
    done = subprocess.run(
        command, env=env | extra, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


_PASSED = ("mebibytes", "rounds", "core", "seed")


def measured(config: Config) -> dict[str, Any]:
    """Measures everything, and returns medians in milliseconds and relative speeds.

    A relative speed is the median over rounds of the time of the copy divided by the
    time of the codec in the same round.
    """
    os.sched_setaffinity(0, {config.core})
    rng = np.random.default_rng(config.seed)
    runs, moved = programs(config.mebibytes, rng)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(config.rounds):
        for name in rng.permutation(list(runs)):
            times[name].append(runs[name]())
    return {
        name: {
            "ms": 1e3 * statistics.median(values),
            "quartiles": [1e3 * q for q in report.quartiles(values)],
            "speed of the copy": statistics.median(
                a / b for a, b in zip(times["copy"], values, strict=True)
            ),
            "bytes moved": moved[name],
        }
        for name, values in times.items()
    } | {
        f"{name}, both": {
            "speed of the copy": statistics.median(
                c / (e + d)
                for c, e, d in zip(
                    times["copy"],
                    times[f"{name}, encode"],
                    times[f"{name}, decode"],
                    strict=True,
                )
            )
        }
        for name in CODECS
    }


def programs(
    mebibytes: int, rng: np.random.Generator, calls: int = 1
) -> tuple[dict[str, Callable[[], float]], dict[str, int]]:
    """Makes the programs to time: the copy, and the two directions of every codec.

    Args:
      mebibytes: The size of the array, in MiB of float32.
      rng: The generator that draws the array.
      calls: The number of calls that are dispatched before waiting for their results.

    Returns:
      Two dicts with the same names: a function that measures the seconds of one call,
      and the bytes that the call reads and writes.
    """
    n = mebibytes * 2**18
    timed = functools.partial(_timed, calls)
    x = jnp.asarray(rng.normal(size=n).astype(np.float32))
    runs, moved = {"copy": timed(jnp.copy, x)}, {"copy": 8 * n}
    for name, make in CODECS.items():
        codec = make()
        state = codec.init(n, jnp.uint32(0))
        payload, _ = jax.jit(codec.encode)(x, state)
        runs[f"{name}, encode"] = timed(codec.encode, x, state)
        runs[f"{name}, decode"] = timed(functools.partial(codec.decode, n=n), payload)
        moved[f"{name}, encode"] = moved[f"{name}, decode"] = 4 * n + codec.size(n)
    return runs, moved


def _timed(calls: int, function: Callable[..., Any], *args: Any) -> Callable[[], float]:
    compiled = jax.jit(function)
    jax.block_until_ready(compiled(*args))

    def run() -> float:
        start = time.perf_counter()
        jax.block_until_ready([compiled(*args) for _ in range(calls)])
        return (time.perf_counter() - start) / calls

    return run


def table(pages: dict[str, Any]) -> list[list[str]]:
    """Returns the table of speeds relative to the copy, for both page sizes."""
    ways = ("encode", "decode", "both")
    titles = [f"{name}: encode, decode, both".split(", ") for name in pages]
    return [
        ["codec", *itertools.chain(*titles)],
        *(
            [
                name,
                *(
                    f"{rows[f'{name}, {way}']['speed of the copy']:.2f}"
                    for rows in pages.values()
                    for way in ways
                ),
            ]
            for name in CODECS
        ),
    ]


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
