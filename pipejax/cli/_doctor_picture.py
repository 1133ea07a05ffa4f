"""The picture of `pipejax doctor`: times measured here, and times predicted."""

import os
import statistics

from pipejax._internal.figures import new_figure

from ._diagnosis import Diagnosis


def picture(found: Diagnosis, path: str | os.PathLike[str]) -> None:
    """Draws measured times, and beside them the step times that are predicted."""
    times = found.overlap.times
    panels = {
        f"measured: {found.overlap.of}": {
            name: 1e3 * statistics.median(values)
            for name, values in times._asdict().items()
        }
    }
    if found.advice:
        title = f"predicted: {found.advice.model.elements:,} parameters"
        panels[title] = {"compute": found.advice.model.compute} | {
            f"{name}\n({choice.config})": 1e3 * choice.step
            for name, choice in found.advice.shown.items()
        }
    figure = new_figure(figsize=(1 + 5 * len(panels), 3), layout="constrained")
    every = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (title, bars) in zip(every, panels.items(), strict=True):
        drawn = axes.barh(list(bars), list(bars.values()))
        axes.bar_label(drawn, fmt="%.1f", padding=3)
        axes.margins(x=0.25)
        axes.invert_yaxis()
        axes.set_title(title)
        axes.set_xlabel("milliseconds a step")
    figure.savefig(path)
