"""Checks that algorithms and codecs send what they declare, on CPU and on H100.

Claim: the declared collectives, those compiled for CPU and those compiled for H100 are
the same in kind and in bytes, collective by collective. Under `psum`, the bytes are
compared in total. The payloads of all codecs are unsigned integers, except under
`psum`, which adds floating-point payloads.

The programs sum a vector of a million elements, the leaves of an MLP, over four
devices. `bytes_sent` is the sum of `wire_bytes` over all collectives. For `tree` and
`parameter_server`, this sum is the number of bytes that cross the link of device 0,
which sends half of them and receives the other half. For all other algorithms, the sum
is the number of bytes that the busiest device sends. The ratio is `bytes_sent` divided
by the bytes that a ring sends at 32 bits, `2 (p-1)/p 4 n` for p devices and n elements.

Command: python -m experiments.wire
Time: about 3 minutes on 2 cores.
Result: experiments/results/wire.json
"""

import dataclasses
import math
import pathlib
import sys
import warnings
from typing import Any, get_args

import jax
import tyro
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax import codecs, collectives
from pipejax._internal.mesh import AxisName, on_mesh
from pipejax.overlap import inspect, topology

from . import exchange, report

SHAPES = ((1000, 992), (992,), (992, 7), (64,))
DEVICES = 4
TWO_AXES = ("host", "device")


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the programs to compile."""

    gpu: str | None = "h100:1x1x4"
    """GPUs to compile for, as `pj.overlap.topology` takes them. None for CPU only."""
    codecs: tuple[str, ...] = ("none", *codecs.NAMES)
    """Codecs to check, by name. With "none", nothing is encoded."""
    out: pathlib.Path = report.RESULTS / "wire.json"
    """File to write the result to, as JSON."""


def main(config: Config) -> int:
    """Compiles every pair, prints the table, and writes the result file.

    Returns:
      The exit code, which is 1 if a program sends something else than declared.
    """
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    warnings.simplefilter("ignore", UserWarning)
    targets: dict[str, Any] = {"cpu": jax.devices()}
    if config.gpu:
        targets["gpu"] = topology(config.gpu)
    rows = []
    for algorithm in (*get_args(exchange.Algorithm), "hierarchical"):
        for codec in config.codecs:
            try:
                all_reduce = make(algorithm, codec)
                rows.append(row(algorithm, codec, all_reduce, targets))
            except ValueError as error:  # not every algorithm takes every codec
                print(f"{algorithm}, {codec}: {str(error).split(';')[0]}")
    report.save(
        config.out,
        seed=0,
        elements=sum(map(math.prod, SHAPES)),
        devices=DEVICES,
        gpu=config.gpu,
        rows=rows,
    )
    report.console(width=110).print(report.table("bytes of a ring", table(rows)))
    wrong = [row for row in rows if not row["same"]]
    for each in wrong:
        print(f"{each['algorithm']}, {each['codec']}: not as declared", file=sys.stderr)
    return int(bool(wrong))


def make(algorithm: Any, codec: Any) -> collectives.AllReduce:
    """Makes an all-reduce by name. `hierarchical` compresses only between hosts."""
    if algorithm == "hierarchical":
        outer = exchange.make_all_reduce("two_shot", codec, feedback=False)
        return collectives.hierarchical(outer=outer)
    return exchange.make_all_reduce(algorithm, codec, feedback=False)


def row(
    algorithm: str,
    codec: str,
    all_reduce: collectives.AllReduce,
    targets: dict[str, Any],
) -> dict[str, Any]:
    """Returns what is declared, and whether the programs of all targets send it."""
    two = algorithm == "hierarchical"
    name: AxisName = TWO_AXES if two else "data"
    layout = collectives.Layout.of_shapes(SHAPES)
    declared: list[collectives.Transfer] = []

    def local(arrays: tuple[jax.Array, ...]) -> Any:
        stages = all_reduce(layout, name)
        declared[:] = stages.transfers
        return collectives.run(stages, collectives.Summands(arrays))[0]

    same, dtypes = True, set[str]()
    for devices in targets.values():
        mesh = pj.data_mesh(devices=devices, axis_name=name, hosts=2 if two else None)
        program = jax.jit(on_mesh(local, mesh, P(), P()))
        found = inspect(program, layout.coded).collectives
        wanted = [(t.kind, t.devices, t.bytes) for t in declared]
        got = [(c.kind, c.group_size, c.bytes) for c in found]
        if algorithm == "psum":  # XLA combines the all-reduces of arrays
            same &= {x[:2] for x in got} == {x[:2] for x in wanted}
            same &= sum(b for *_, b in got) == sum(b for *_, b in wanted)
        elif two:
            same &= got == wanted
        else:  # a permute has a group of only the devices that it joins
            same &= [(k, b) for k, _, b in got] == [(k, b) for k, _, b in wanted]
        dtypes |= {dtype for c in found for dtype in c.dtypes}
    sent = sum(t.wire_bytes for t in declared)
    return {
        "algorithm": algorithm,
        "codec": codec,
        "collectives": len(declared),
        "bytes_sent": sent,
        "ratio": sent / (2 * (DEVICES - 1) / DEVICES * 4 * layout.coded_size),
        "dtypes": sorted(dtypes),
        "same": same,
    }


def table(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Returns the table of bytes, relative to those of a ring with 32 bits."""
    ratios = {(row["algorithm"], row["codec"]): f"{row['ratio']:.3f}" for row in rows}
    algorithms, measured = (dict.fromkeys(names) for names in zip(*ratios, strict=True))
    return [
        ["codec", *algorithms],
        *(
            [codec, *(ratios.get((algorithm, codec), "") for algorithm in algorithms)]
            for codec in ("none", *codecs.NAMES)
            if codec in measured
        ),
    ]


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Config, description=__doc__)))
