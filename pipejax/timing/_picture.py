"""Scaling as a picture: efficiency by the number of hosts."""

import os
from collections.abc import Mapping

from pipejax.picture import new_figure


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
