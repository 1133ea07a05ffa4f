"""Measures the theory of delayed gradients on problems whose optimum is known.

Claims, all for the real train step with a plain delay, `weight_prediction=False`:

- Regret never exceeds the bounds of Langford, Smola and Zinkevich. Against an
  adversary, regret grows as the bounds do: like sqrt(K T) for convex losses, and nearly
  like K for strongly convex losses. If examples come in random order, a delay costs far
  less.
- For smooth losses and examples in random order, a delay no longer shows in the excess
  at the end.
- At a large learning rate, a random delay does less harm than a fixed delay of the same
  mean. At a small learning rate, neither does harm.
- A codec that rounds to many levels costs nothing at any width. Error feedback recovers
  what other codecs lose, at width 4 as well as at width 1.

Command: python -m experiments.convex --data-dir ~/tensorflow_datasets
Time: about three minutes on 2 cores.
Result: experiments/results/convex.json, docs/convex.png, docs/stability.png
"""

import dataclasses
import json
import pathlib
from typing import Any

import jax
import numpy as np
import optax
import tyro

from experiments import data, report
from pipejax import problems, transforms
from pipejax._internal.figures import new_figure

from . import _codecs, _picture, _random, _real, _regret, _smooth
from ._run import slope


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the measurement."""

    widths: tuple[int, ...] = (1, 2, 4, 8, 16)
    """The widths of the pipeline."""
    log2_steps: int = 14
    """The logarithm to base 2 of the number of steps of the longest runs."""
    data: tuple[str, ...] = ("digits", "mnist", "cifar10_jpeg")
    """The data sets for softmax regression."""
    data_dir: pathlib.Path | None = None
    """The folder of the TFDS data sets; by default TFDS's own folder."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """The seeds of the order of examples."""
    out: pathlib.Path = report.RESULTS / "convex.json"
    """The file that the result is written to."""
    plot: pathlib.Path = pathlib.Path("docs/convex.png")
    """The file that the picture is written to."""
    stability_plot: pathlib.Path = pathlib.Path("docs/stability.png")
    """The file that the picture of the stable learning rates is written to."""
    redraw: bool = False
    """Draw the pictures of an existing result, and run nothing."""


def main(config: Config) -> dict[str, Any]:
    """Runs all parts, prints the tables, saves the result, and draws."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", _codecs.DEVICES)
    if config.redraw:
        result = json.loads(config.out.read_text())
    else:
        result = run_all(config)
        report.save(config.out, **report.settings(config), **result)
    show(result)
    picture(result, config.plot)
    _picture.picture(FAMILIES).savefig(config.stability_plot, dpi=110)
    return result


def run_all(config: Config) -> dict[str, Any]:
    """Runs all parts and returns their figures."""
    times = 2 ** np.arange(8, config.log2_steps + 1)
    logistic = some_logistic()
    steps = 2 ** (config.log2_steps - 2)
    return {
        "times": times.tolist(),
        "regret": {
            name: _regret.measured(game, config.widths, times, config.seeds)
            for name, game in _regret.games().items()
        },
        "smooth": _smooth.excess_of_averages(
            logistic, config.widths, times, config.seeds
        ),
        "rates": list(RATES),
        "random": _random.by_rate(
            logistic, config.widths[1:], RATES, steps, config.seeds
        ),
        "codecs": _codecs.excess(logistic, (1, 2, 4), 0.2, steps, config.seeds),
        "softmax": {
            name: _real.excess(
                _real.softmax(name, config.data_dir),
                config.widths,
                times[times <= steps],
                config.seeds,
            )
            for name in config.data
        },
    }


RATES = tuple(0.05 * 2**i for i in range(8))


def heavy_ball(
    learning_rate: float, momentum: float, *, width: int
) -> optax.GradientTransformation:
    """Makes heavy-ball, which does not depend on the width."""
    del width
    return optax.sgd(learning_rate, momentum)


def extrapolated(
    learning_rate: float, momentum: float, *, width: int
) -> optax.GradientTransformation:
    """Makes heavy-ball that repeats its last update for every gradient in flight."""
    correction = transforms.extrapolate_updates(width - 1)
    return optax.chain(optax.sgd(learning_rate, momentum), correction)


def delay_robust(
    learning_rate: float, momentum: float, *, width: int
) -> optax.GradientTransformation:
    """Makes heavy-ball whose momentum `delay_robust` replaces."""
    correction = transforms.delay_robust(momentum, width)
    return optax.chain(optax.sgd(learning_rate, momentum), correction)


FAMILIES = {
    "heavy-ball": heavy_ball,
    "heavy-ball, extrapolate_updates": extrapolated,
    "heavy-ball, delay_robust": delay_robust,
}


def some_logistic() -> problems.Problem:
    """Makes a logistic problem whose features have unequal sizes.

    Parameters of large features thus learn faster than those of small ones.
    """
    rng = np.random.default_rng(1)
    x = rng.normal(size=(256, 64)) * np.geomspace(1.0, 0.1, 64)
    y = np.where(x @ rng.normal(size=64) + rng.normal(size=256) > 0, 1, -1)
    return problems.logistic(x, y, l2=1e-2)


def regret_rows(result: dict[str, Any]) -> list[list[str]]:
    """Returns titles, then a row for each game.

    The columns say how regret and its bound grow with T and K, and the largest share of
    the bound that the regret reaches.
    """
    titles = ("losses", "regret: with T", "bound: with T", "regret: with K")
    table = [[*titles, "bound: with K", "largest share of the bound"]]
    half = len(result["times"]) // 2  # from here on, powers are fitted
    for name, game in result["regret"].items():
        rows = game["widths"]
        late = result["times"][half:]
        found = [row["slope in T"] for row in rows.values()]
        bounds = [slope(late, row["bound"][half:]) for row in rows.values()]
        delayed = {int(width): row["bound"][-1] for width, row in rows.items()}
        del delayed[1]
        in_k = slope(list(delayed), list(delayed.values()))
        worst = max(row["worst of the bound"] for row in rows.values())
        table.append(
            [
                *(name, _powers(found), _powers(bounds)),
                *(f"K^{game['slope in K']:.2f}", f"K^{in_k:.2f}", f"{worst:.2f}"),
            ]
        )
    return table


def _powers(exponents: list[float]) -> str:
    least, most = (f"T^{limit(exponents):.2f}" for limit in (min, max))
    return least if least == most else f"{least} to {most}"


def codec_rows(rows: dict[str, Any]) -> list[list[str]]:
    """Returns titles, then a row for each codec, with a number for each width.

    All numbers are divided by the first number of the first row.
    """
    first = next(iter(next(iter(rows.values())).values()))
    columns = list(next(iter(rows.values())))
    return [
        ["codec", *(f"K={width}" for width in columns)],
        *(
            [name, *(f"{value / first:.2f}" for value in row.values())]
            for name, row in rows.items()
        ),
    ]


def show(result: dict[str, Any]) -> None:
    """Prints the tables of regret and of the excess with codecs."""
    console = report.console(width=110)
    console.print(report.table("regret", regret_rows(result)))
    console.print(report.table("excess", codec_rows(result["codecs"])))


def picture(result: dict[str, Any], path: pathlib.Path) -> None:
    """Draws regret and its bounds, and the excess in the other parts.

    These are smooth losses, fixed and random delays, and softmax regression.
    """
    figure = new_figure(figsize=(13, 8), layout="constrained")
    panels = figure.subplots(2, 3).ravel()
    times = np.array(result["times"])
    names = ("adversary, lines", "adversary, parabolas", "absolute loss")
    for axes, name in zip(panels, names, strict=False):
        for place, (width, row) in enumerate(result["regret"][name]["widths"].items()):
            regret, bound = np.array(row["regret"]), np.array(row["bound"])
            axes.loglog(times, regret / times, color=f"C{place}", label=f"K={width}")
            axes.loglog(times, bound / times, "--", color=f"C{place}", linewidth=0.8)
        axes.set(title=f"regret / T: {name} (dashed: bound)", xlabel="T")
    of_smooth = result["smooth"]
    for width, row in of_smooth.items():
        panels[3].semilogx(times, np.array(row) / of_smooth["1"], label=f"K={width}")
    panels[3].set(title="smooth losses: excess over that of K=1", xlabel="T")
    for place, (name, row) in enumerate(result["random"].items()):
        style = "-" if name.startswith("fixed") else ":"
        panels[4].loglog(
            result["rates"], row, style, color=f"C{place // 2}", label=name
        )
    panels[4].set(title="excess: a fixed and a random delay", xlabel="learning rate")
    styles = ("-", "--", ":")
    for (name, rows), style in zip(result["softmax"].items(), styles, strict=False):
        for place, row in enumerate(rows.values()):
            title = data.TITLES.get(name, name)
            label = None if place else f"{title}, all K"
            steps = times[: len(row)]
            panels[5].loglog(steps, row, style, color=f"C{place}", label=label)
    panels[5].set(title="softmax regression: excess, K=1 to 16", xlabel="steps")
    panels[5].set_xticks(steps, [f"{n:,}" for n in steps])
    panels[5].minorticks_off()
    for axes in panels:
        axes.grid(alpha=0.3)
    for axes in (panels[0], panels[3], panels[4], panels[5]):  # of 0, 1 and 2 alike
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
