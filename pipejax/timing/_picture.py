"""Pictures: efficiency by the number of hosts, and where an all-reduce's time goes."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pipejax.picture import new_figure

from ._profile import Profile


def picture(
    curves: Mapping[str, Mapping[int, float]], path: str | os.PathLike[str]
) -> None:
    """Draws curves of `scaling`.

    Args:
      curves: by what the legend is to say.
      path: of the picture; its ending says in which format.

    Raises:
      ImportError: without matplotlib.
    """
    figure = new_figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for title, curve in curves.items():
        axes.plot(list(curve), list(curve.values()), marker=".", label=title)
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, 1.05)
    axes.set_xlabel("hosts, each with as large a batch as one alone")
    axes.set_ylabel("throughput of p hosts / p times that of one")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower left")
    figure.savefig(path)


class Panel(NamedTuple):
    """What `profile` returned of one cluster.

    Attributes:
      title: of it.
      profiles: by name, the same names in all panels.
      limits: seconds that the bytes take on the wire, by name.
    """

    title: str
    profiles: Mapping[str, Profile]
    limits: Mapping[str, float]


def profile_picture(panels: Sequence[Panel], path: str | os.PathLike[str]) -> None:
    """Draws each all-reduce as a bar of its phases, a mark at its limit.

    Args:
      panels: side by side.
      path: of the picture; its ending says in which format.

    Raises:
      ImportError: without matplotlib.
    """
    rows = max(len(panel.profiles) for panel in panels)
    size = (3 + 5 * len(panels), 1.2 + 0.3 * rows)
    figure = new_figure(figsize=size, layout="constrained")
    every = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for panel, axes in zip(panels, every, strict=True):
        _draw(panel, axes)
    every[0].invert_yaxis()
    handles, labels = every[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels))
    figure.savefig(path)


def _draw(panel: Panel, axes: Any) -> None:
    profiles, limits = panel.profiles, panel.limits
    places = range(len(profiles))
    left = [0.0] * len(profiles)
    for phase in Profile._fields:
        widths = [1e3 * getattr(profile, phase) for profile in profiles.values()]
        axes.barh(places, widths, left=left, label=phase)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for place, name in enumerate(profiles):
        if name in limits:
            edge = 1e3 * limits[name]
            axes.plot([edge, edge], [place - 0.4, place + 0.4], color="black")
    axes.set_yticks(places, list(profiles))
    axes.set_title(panel.title)
    axes.set_xlabel("milliseconds" + (", black: bytes on the wire" if limits else ""))
