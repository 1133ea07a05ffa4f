"""A cluster's speeds, measured.

What cores do, encode, decode and add, is measured apart from the network, on all hosts
at once, so that those that share a core do.
"""

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
from ._counts import FLOAT32, FORMS, Algorithm
from ._exchange import Exchange
from ._fit import Fit, Sample, fit
from ._leaves import square_leaves
from ._stopwatch import Case, check_several, exchange_times, in_turn

SIZES = (2**12, 2**16, 2**18, 2**20, 2**21)
ALGORITHMS: tuple[Algorithm, ...] = (
    "psum",
    "ring",
    "two_shot",
    "halving_doubling",
    "tree",
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
            tuple(times[name]),
            n,
        )
        for name, (algorithm, n) in cases.items()
    )
    return fit(mesh.size, samples, *core_speeds(mesh, codecs or {}, max(sizes), rounds))


def core_speeds(
    mesh: Mesh, codecs: Mapping[str, Codec], elements: int, rounds: int
) -> tuple[float, dict[str, CodecSpeed]]:
    """Bytes of float32 a second that are added, and that each codec reads and makes.

    By a device of each host, all hosts at once; of vectors of about so many elements,
    with the leaves of `square_leaves`.
    """
    x = jnp.arange(elements, dtype=jnp.float32)
    work, sizes = {"add": _call(jnp.add, x, x)}, {"add": elements}
    for name, codec in codecs.items():
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
