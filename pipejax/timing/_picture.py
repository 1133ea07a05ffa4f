"""Pictures: efficiency by the number of hosts, and where an all-reduce's time goes."""

import os
from collections.abc import Mapping

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


def profile_picture(
    profiles: Mapping[str, Profile],
    path: str | os.PathLike[str],
    limits: Mapping[str, float] | None = None,
) -> None:
    """Draws each all-reduce as a bar of its phases, a mark at its limit.

    Args:
      profiles: what `profile` returned.
      path: of the picture; its ending says in which format.
      limits: seconds that its bytes take on the wire, by the same names.

    Raises:
      ImportError: without matplotlib.
    """
    size = (9, 1.2 + 0.3 * len(profiles))
    figure = new_figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    places = range(len(profiles))
    left = [0.0] * len(profiles)
    for phase in Profile._fields:
        widths = [1e3 * getattr(profile, phase) for profile in profiles.values()]
        axes.barh(places, widths, left=left, label=phase)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for place, name in enumerate(profiles):
        if limits and name in limits:
            edge = 1e3 * limits[name]
            axes.plot([edge, edge], [place - 0.4, place + 0.4], color="black")
    axes.set_yticks(places, list(profiles))
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds" + (", black: bytes on the wire" if limits else ""))
    figure.legend(loc="outside upper center", ncols=len(Profile._fields))
    figure.savefig(path)
