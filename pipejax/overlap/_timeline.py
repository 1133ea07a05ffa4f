"""Draws a schedule: compute at the bottom, collectives in progress above it."""

import itertools
import os
from collections.abc import Mapping
from typing import Any

from pipejax._internal.figures import new_figure
from pipejax._internal.hlo import Item, Report, amount

_MATMUL, _OTHER, _HIDDEN, _WAITS = "#3b6ea5", "#c3d3e4", "#4f9d69", "#c8403a"
# Width of all hairs together, where the width of all FLOPs together is 1.
_HAIRS = 0.08
_LANE = 0.36  # Height in inches.


def timeline(
    reports: Report | Mapping[str, Report], path: str | os.PathLike[str]
) -> None:
    """Draws one schedule, or several below one another, and saves the picture.

    Compute is at the bottom, from left to right in the order of the schedule. The width
    of a matmul is proportional to its FLOPs, and other kernels are narrow bars of equal
    width. A green bar above is an asynchronous collective and spans the compute that
    runs meanwhile. A red bar is a synchronous collective, at which all compute waits.

    Args:
      reports: A report of `inspect`, whose title is the name of the program, or a
        mapping from titles to reports.
      path: File to write. Its suffix selects the format, such as `.png` or `.svg`.

    Raises:
      ImportError: If matplotlib is not installed.
    """
    several = {reports.program: reports} if isinstance(reports, Report) else reports
    lanes = [_lanes(report) for report in several.values()]
    heights = [(max((lane for _, lane in x), default=-1) + 2) * _LANE for x in lanes]
    figure = new_figure(figsize=(9, sum(heights) + 0.75 * len(heights) + 0.3))
    from matplotlib.patches import Patch

    axes = figure.subplots(len(heights), squeeze=False, height_ratios=heights)[:, 0]
    for axis, (title, report), placed in zip(axes, several.items(), lanes, strict=True):
        _draw(axis, title, report, placed)
    kinds = {"matmul": _MATMUL, "other kernel": _OTHER, "asynchronous": _HIDDEN}
    patches = [Patch(color=color, label=kind) for kind, color in kinds.items()]
    axes[0].legend(
        handles=[*patches, Patch(color=_WAITS, label="synchronous")],
        loc="lower right",
        bbox_to_anchor=(1, 1),
        ncols=4,
        fontsize=7,
        frameon=False,
        handlelength=1,
    )
    axes[-1].set_xlabel("share of the program's FLOPs, in the order of the schedule")
    figure.tight_layout(h_pad=1.2)
    figure.savefig(path, dpi=150)


def _draw(axis: Any, title: str, report: Report, lanes: list[tuple[Item, int]]) -> None:
    edges, flops = _edges(report)
    compute = [item for item in report.schedule if item.kind in ("matmul", "other")]
    for kind, color in (("other", _OTHER), ("matmul", _MATMUL)):
        bars = [
            (edges[item.start], edges[item.end] - edges[item.start])
            for item in compute
            if item.kind == kind
        ]
        edge = 0.3 if kind == "matmul" else 0
        axis.broken_barh(bars, (0, 0.8), color=color, edgecolor="white", linewidth=edge)
    sizes = {c.name: c for c in report.collectives}
    for item, lane in lanes:
        start, end = edges[item.start], edges[item.end]
        one = sizes[item.name]
        color = _HIDDEN if one.asynchronous else _WAITS
        bar = max(end - start, 0.006)
        axis.broken_barh(
            [(start, bar)], (lane + 1, 0.8), color=color, edgecolor="white"
        )
        if not one.asynchronous:
            axis.plot([start] * 2, [0, lane + 1], color=color, linewidth=1)
        times = f" x {one.times}" if one.times > 1 else ""
        text = f"{one.kind}, {amount(one.wire_bytes)}B sent{times}"
        text += "" if one.asynchronous else ", all wait"
        inside, right = bar > 0.3, start + bar < 0.7
        axis.text(
            start + (bar / 2 if inside else bar + 0.006 if right else -0.006),
            lane + 1.4,
            text,
            ha="center" if inside else "left" if right else "right",
            va="center",
            fontsize=8,
            color="white" if inside else color,
        )
    lanes_above = max((lane for _, lane in lanes), default=-1) + 1
    covered = "no collectives"
    if report.collectives and report.covered is not None:
        covered = f"{report.covered:.0%} of the FLOPs under communication"
    axis.set_title(f"{title}: {covered}", fontsize=9, loc="left")
    axis.set_xlim(-0.005, 1.005)
    axis.set_ylim(-0.15, lanes_above + 1)
    middle = [0.4] + ([1 + (lanes_above - 1) / 2 + 0.4] if lanes_above else [])
    axis.set_yticks(middle, ["compute", "network"][: len(middle)], fontsize=8)
    axis.tick_params(axis="y", length=0)
    axis.tick_params(axis="x", labelsize=8)
    ticks = [0, 0.25, 0.5, 0.75, 1]
    axis.set_xticks([_at(tick, edges, flops) for tick in ticks], map(str, ticks))
    axis.spines[["top", "right", "left"]].set_visible(False)


def _edges(report: Report) -> tuple[list[float], list[float]]:
    """Returns the left edge of each compute item, and the share of FLOPs before it."""
    compute = [item for item in report.schedule if item.kind in ("matmul", "other")]
    total = sum(item.flops for item in compute) or 1.0
    hair = _HAIRS / max(1, sum(item.flops == 0 for item in compute))
    widths = [item.flops / total or hair for item in compute]
    scale = sum(widths) or 1.0
    edges = itertools.accumulate((width / scale for width in widths), initial=0.0)
    done = itertools.accumulate((item.flops / total for item in compute), initial=0.0)
    return list(edges), list(done)


def _at(tick: float, edges: list[float], flops: list[float]) -> float:
    """Returns the horizontal position at which the share `tick` of FLOPs is done."""
    i = next((i for i, done in enumerate(flops) if done >= tick - 1e-9), 0)
    if i == 0 or flops[i] == flops[i - 1]:
        return edges[i]
    part = (tick - flops[i - 1]) / (flops[i] - flops[i - 1])
    return edges[i - 1] + part * (edges[i] - edges[i - 1])


def _lanes(report: Report) -> list[tuple[Item, int]]:
    """Puts each collective on the lowest lane that is free where it starts."""
    ends: list[int] = []
    placed = []
    collectives = [x for x in report.schedule if x.kind not in ("matmul", "other")]
    for item in sorted(collectives, key=lambda item: item.start):
        free = (i for i, end in enumerate(ends) if end <= item.start)
        lane = next(free, len(ends))
        ends[lane : lane + 1] = [max(item.end, item.start + 1)]
        placed.append((item, lane))
    return placed
