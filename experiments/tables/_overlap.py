"""Makes the tables of what compilers schedule under an all-reduce, and of memory."""

from typing import Any

from experiments.report import result

_PROGRAMS = {
    "pipelined": "pipelined",
    "pipelined, int8": "two-shot",
    "synchronous": "D-Sync",
    "synchronous, hand-written": "D-Sync by hand",
    "the same, XLA's defaults": "D-Sync by hand, defaults",
    "hand-written pipeline, XLA's defaults": "naive, defaults",
    "control": "negative control",
}


def gpus() -> list[list[str]]:
    """Returns the least and the greatest share over GPUs, by model and program."""
    covered, models, targets = _covered("overlap")
    table = [["model", *_PROGRAMS]]
    for model in models:
        row = [model]
        for program in _PROGRAMS.values():
            found = [covered[model, x, program] for x in targets]
            row.append(f"{min(found):.2f} - {max(found):.2f}")
        table.append(row)
    return table


def partly() -> list[list[str]]:
    """Returns the share on 64 H100 if only some gradients, or parts, are delayed."""
    covered, models, _ = _covered("overlap")
    target = "h100:1x8x8"
    delayed = {
        cell["model"]: cell["delayed"]
        for cell in result("overlap")["cells"]
        if cell["program"] == "least delay"
    }
    programs = {"all delayed": "pipelined", "least delay": "least delay"}
    programs |= {"rank 8 at once": "at once"}
    between = {
        cell["model"]: cell["between_hosts"]
        for cell in result("overlap")["cells"]
        if cell["program"] == "two levels"
    }
    return [
        ["model", "least delay, bytes", *programs, "two levels, between hosts"],
        *(
            [
                model,
                f"{delayed[model]:.0%}",
                *(f"{covered[model, target, x]:.2f}" for x in programs.values()),
                f"{between[model]:.2f}",
            ]
            for model in models
        ),
    ]


def tpus() -> list[list[str]]:
    """Returns the share of each model on each kind of TPU."""
    covered, models, targets = _covered("overlap_tpu")
    return [
        ["eight chips", *models],
        *(
            [x, *(f"{covered[model, x, 'pipelined']:.2f}" for model in models)]
            for x in targets
        ),
    ]


def _covered(name: str) -> tuple[dict[Any, float], list[str], list[str]]:
    """Returns shares by model, target and program; the models; and the targets."""
    covered = {
        (cell["model"], cell["target"], cell["program"]): cell["covered"]
        for cell in result(name)["cells"]
    }
    models, targets, _ = (list(dict.fromkeys(x)) for x in zip(*covered, strict=True))
    return covered, models, targets


def unsharded() -> list[dict[str, Any]]:
    """Returns the cells of steps whose optimizer is not sharded."""
    cells = result("memory")["cells"]
    return [cell for cell in cells if "sharded" not in cell["step"]]


def memory() -> list[list[str]]:
    """Returns the table of memory; that of the step by hand stands in brackets."""
    cells = unsharded()
    rows: dict[str, list[str]] = {}
    for cell in cells:
        by_hand = "" if cell["by_hand"] is None else f" ({cell['by_hand']:.2f})"
        rows.setdefault(cell["model"], []).append(f"{cell['live']:.2f}{by_hand}")
    titles = dict.fromkeys(cell["step"] for cell in cells)
    return [["model", *titles], *([model, *row] for model, row in rows.items())]
