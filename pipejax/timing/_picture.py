"""Pictures of scaling efficiency and of where all-reduces spend their time."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pipejax._internal.figures import new_figure

from ._profile import Profile


def picture(
    curves: Mapping[str, Mapping[int, float]], path: str | os.PathLike[str]
) -> None:
    """Draws scaling efficiency over the number of hosts and saves the picture.

    Args:
      curves: The curves that `pj.timing.scaling` returns, by their titles in the
        legend.
      path: The file to write. Its extension, such as `.png` or `.svg`, chooses the
        format.

    Raises:
      ImportError: If matplotlib is not installed.
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
    """The profiles of all-reduces on one cluster, for `profile_picture`.

    Attributes:
      title: The title of the panel.
      profiles: The profiles that `pj.timing.profile` returned, by the names of the
        all-reduces. All panels in a row of a picture must have the same names.
      limits: The seconds that the bytes of an all-reduce take on the wire, by its name.
        The picture shows it as a black mark on the bar. A name may be missing.
    """

    title: str
    profiles: Mapping[str, Profile]
    limits: Mapping[str, float]


def profile_picture(
    panels: Sequence[Panel], path: str | os.PathLike[str], columns: int | None = None
) -> None:
    """Draws each all-reduce as a bar that is stacked from its phases, and saves it.

    Args:
      panels: The panels, for example one for each cluster.
      path: The file to write. Its extension chooses the format.
      columns: The number of panels side by side, `None` for all of them. The panels of
        a row must have the same all-reduces.

    Raises:
      ImportError: If matplotlib is not installed.
    """
    across = columns or len(panels)
    down = -(-len(panels) // across)
    bars = max(len(panel.profiles) for panel in panels)
    size = (3 + 5 * across, 0.7 + down * (0.7 + 0.3 * bars))
    figure = new_figure(figsize=size, layout="constrained")
    every = figure.subplots(down, across, sharey="row", squeeze=False)
    for panel, axes in zip(panels, every.flat, strict=False):
        _draw(panel, axes)
    for first in every[:, 0]:
        first.invert_yaxis()
    for axes in every.flat[len(panels) :]:
        axes.remove()
    handles, labels = every[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels))
    figure.savefig(path)


_LABELS = {"first": "first exchange", "second": "second exchange"}


def _draw(panel: Panel, axes: Any) -> None:
    profiles, limits = panel.profiles, panel.limits
    places = range(len(profiles))
    left = [0.0] * len(profiles)
    for phase in Profile._fields:
        widths = [1e3 * getattr(profile, phase) for profile in profiles.values()]
        axes.barh(places, widths, left=left, label=_LABELS.get(phase, phase))
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for place, name in enumerate(profiles):
        if name in limits:
            edge = 1e3 * limits[name]
            axes.plot([edge, edge], [place - 0.4, place + 0.4], color="black")
    axes.set_yticks(places, list(profiles))
    axes.set_title(panel.title)
    axes.set_xlabel("milliseconds" + (", black: bytes on the wire" if limits else ""))
