"""Measures all that only a GPU can show, in eight minutes.

- exact: whether steps and codecs compute the bits of steps by hand and of the CPU
- codecs: the speed at which each codec encodes and decodes, compared with a copy, which
  is the limit
- steps: the time of a step of five models at widths 1 and 2, compared with equivalent
  steps written by hand
- memory: the bytes that the allocator reports, compared with those that the compiled
  program declares
- trace: a profile of the host executor, whose copies run beside kernels
- overlap: on several GPUs, the share of communication that is hidden, compared with the
  share of FLOPs that the schedule runs during communication
- hosts: the time of a step of the host executor, in two processes that share the GPU,
  over links of 1 and 10 Gbit/s; the limit is the longer of compute and exchange

Every part runs in a process of its own, so that a failure harms no other part and each
part finds the memory of the GPU free. The result file says which part failed and why,
and which part was left out and why. What an earlier run has measured stays until it is
measured again.

Command: python -m experiments.gpu; with --parts codecs steps for some of the parts,
while the others stay as they are
Time: 8 minutes with a GPU, at most 9; on a CPU, with smaller sizes, 4 minutes on 2
cores.
Result: experiments/results/gpu_DEVICE.json, of each device one
"""

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import tyro

from experiments import report
from experiments.cluster import reason_why_not

from . import _codecs, _exact, _hosts, _steps, _trace


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the measurement."""

    seconds: float = 480
    """The time for all parts together, in seconds. No part begins after this time, and
    one that runs then is stopped a minute later."""
    parts: tuple[str, ...] = ()
    """The parts to run, such as `codecs` or `steps`; by default all."""
    child: str | None = None
    """The part to run in this process. The program calls itself with this flag."""
    out: pathlib.Path | None = None
    """The file that the result is written to; the default is given above."""


PARTS: dict[str, tuple[str, ...]] = {
    "exact": ("exact",),
    "codecs": ("codecs",),
    "steps": tuple(f"steps:{model}" for model in _steps.MODELS),
    "memory": tuple(
        f"memory:{model}:{step}"
        for model in ("resnet18", "transformer")
        for step in _steps.STEPS
    ),
    "trace": ("trace",),
    "overlap": ("overlap:transformer",),
    "hosts": tuple(
        f"hosts:{rate}:{algorithm}"
        for rate in _hosts.MICROBATCHES
        for algorithm in _hosts.ALGORITHMS
    ),
}
GRACE = 60  # seconds for which a part may run when the time is up
TIME_IS_UP = {"left_out": "the time was up"}
RUNS: dict[str, Callable[..., Any]] = {
    "exact": _exact.measured,
    "codecs": _codecs.measured,
    "steps": _steps.measured,
    "memory": _steps.memory,
    "trace": _trace.measured,
    "overlap": _steps.overlapped,
}


def main(config: Config) -> int:
    """Runs all parts, prints their figures, and saves the result.

    Returns:
      The exit code: 1 if a part has failed, and 0 otherwise.
    """
    if config.child:
        part, *arguments = config.child.split(":")
        found = RUNS[part](*arguments)
        print(json.dumps({"device": _device(), "found": found}))
        return 0
    start, found = time.monotonic(), dict[str, dict[str, Any]]()
    for name in config.parts or PARTS:
        for part in PARTS[name]:
            left = config.seconds - (time.monotonic() - start)
            found[part] = run(part, left) if left > 0 else TIME_IS_UP
            print(f"{part}: {_in_short(found[part])}", flush=True)
    # Only now, because a process that has looked for the GPU takes its memory.
    name = re.sub(r"[^a-z0-9]+", "_", _device().lower()).strip("_")
    out = config.out or report.RESULTS / f"gpu_{name}.json"
    cells = {cell["part"]: cell for cell in report.kept(out)}
    for part, figures in found.items():
        if "found" in figures or "found" not in cells.get(part, {}):
            cells[part] = {"part": part, **report.origin(), **figures}
    report.save(out, seed=0, cells=list(cells.values()))
    return int(any("failed" in figures for figures in found.values()))


def run(part: str, seconds: float) -> dict[str, Any]:
    """Runs a part in a process of its own, for at most `seconds` and `GRACE`.

    Returns:
      The figures of the part, or why it failed or was left out.
    """
    name, *arguments = part.split(":")
    if name == "hosts":
        if why := reason_why_not():
            return {"left_out": why}
        return _hosts.measured(*arguments)
    env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if name == "exact":
        # Sums in a fixed order, so that two runs of a program have the same bits.
        flags = env.get("XLA_FLAGS", "")
        env["XLA_FLAGS"] = f"{flags} --xla_gpu_deterministic_ops=true"
    with tempfile.TemporaryFile("w+") as errors:
        try:
            done = subprocess.run(
                [sys.executable, "-m", "experiments.gpu", "--child", part],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                check=False,
                env=env,
                timeout=seconds + GRACE,
            )
        except subprocess.TimeoutExpired:
            return TIME_IS_UP
        if done.returncode == 0:
            return json.loads(done.stdout.splitlines()[-1])
        errors.seek(0)
        lines = errors.read().strip().splitlines() or ["it said nothing"]
        return {"failed": f"exit code {done.returncode}: {lines[-1]}"}


def _device() -> str:
    import jax

    devices = jax.devices()
    return f"{len(devices)} x {devices[0].device_kind}"


def _in_short(found: dict[str, Any]) -> str:
    for name in ("failed", "left_out"):
        if name in found:
            return f"{name.replace('_', ' ')}: {found[name]}"
    return json.dumps(found["found"])


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Config, description=__doc__)))
