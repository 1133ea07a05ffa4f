"""Profiles the host executor: how long copies run, and for how long beside kernels."""

import glob
import gzip
import json
import pathlib
import re
import tempfile
from typing import Any

import jax

import pipejax as pj
from experiments import overlap

from ._arrays import filled, is_small

Spans = list[tuple[float, float]]
_COPY = re.compile("memcpy|copy", re.IGNORECASE)
_COLLECTIVE = re.compile("nccl|all-reduce|all_reduce", re.IGNORECASE)


def measured() -> dict[str, Any]:
    """Profiles three steps, and returns the figures of `read`."""
    import optax

    problem = overlap.plain_problem(
        "mlp" if is_small() else "resnet18", len(jax.devices())
    )
    train = pj.make_train_step(
        problem.loss_fn, optax.adamw(1e-3), mesh=pj.data_mesh(), executor="host"
    )
    state, batch = train.init(filled(problem.params)), filled(problem.batch)
    state, _ = jax.block_until_ready(train.step(state, batch))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(3):
                state, _ = train.step(state, batch)
            jax.block_until_ready(train.drain(state))
        return read(pathlib.Path(folder))


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
