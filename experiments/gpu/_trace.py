"""Profiles the host executor: how long copies run, and for how long beside kernels."""

import glob
import gzip
import json
import pathlib
import re
import tempfile
from typing import Any

import jax
import optax

import pipejax as pj

from ._arrays import filled, large_batch

STEPS = 10
Spans = list[tuple[float, float]]
_COPY = re.compile("memcpy|copy", re.IGNORECASE)
_COLLECTIVE = re.compile("nccl|all-reduce|all_reduce", re.IGNORECASE)


def measured() -> dict[str, Any]:
    """Profiles ten steps on one device, and returns the figures of `read`."""
    problem = large_batch()
    train = pj.make_train_step(
        problem.loss_fn, optax.adamw(1e-3), mesh=pj.data_mesh(1), executor="host"
    )
    state = train.init(filled(problem.params))
    batch = train.batch(filled(problem.batch))
    for _ in range(3):
        state, _ = train.step(state, batch)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # tracing Python would slow the host down
    jax.block_until_ready(state)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(STEPS):
                state, _ = train.step(state, batch)
            jax.block_until_ready(state)
        found = read(pathlib.Path(folder))
    train.drain(state)
    return found


def read(folder: pathlib.Path) -> dict[str, Any]:
    """Reads a profile.

    Returns:
      For kernels, copies and collectives, the time for which they run, and the part of
      this time in which kernels run as well, in microseconds.
    """
    (path,) = glob.glob(f"{folder}/**/*.trace.json.gz", recursive=True)
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    names = {
        event["pid"]: event["args"].get("name", "")
        for event in events
        if event.get("name") == "process_name"
    }
    kinds: dict[str, Spans] = {"kernels": [], "copies": [], "collectives": []}
    for event in events:
        if event.get("ph") == "X" and "GPU" in names.get(event.get("pid"), ""):
            span = event["ts"], event["ts"] + event.get("dur", 0)
            kinds[_kind(event["name"])].append(span)
    kernels = merged(kinds["kernels"])
    return {
        kind: {
            "microseconds": length(merged(spans)),
            "beside_kernels": length(both(merged(spans), kernels)),
        }
        for kind, spans in kinds.items()
    }


def _kind(name: str) -> str:
    if _COLLECTIVE.search(name):
        return "collectives"
    return "copies" if _COPY.search(name) else "kernels"


def merged(spans: Spans) -> Spans:
    """Returns spans that cover the same time and do not overlap.

    >>> merged([(3, 5), (0, 2), (1, 4)])
    [(0, 5)]
    """
    found: Spans = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def both(one: Spans, other: Spans) -> Spans:
    """Returns the time that lies in both lists of spans.

    The spans of each list must not overlap.

    >>> both([(0, 4), (6, 9)], [(2, 7)])
    [(2, 4), (6, 7)]
    """
    pairs = ((max(a, c), min(b, d)) for a, b in one for c, d in other)
    return [(start, end) for start, end in pairs if start < end]


def length(spans: Spans) -> float:
    """Returns the sum of the lengths of all spans."""
    return sum(end - start for start, end in spans)
