"""Tests that the documents show what XLA schedules under an all-reduce."""

import pytest

from .results import assert_shown, result


def rows_of_overlap():
    """Yields the range over targets on GPUs, and one row for each model on TPUs."""
    covered = {
        (cell["model"], cell["target"], cell["program"]): cell["covered"]
        for name in ("overlap", "overlap_tpu")
        for cell in result(name)["cells"]
    }
    models = list(dict.fromkeys(model for model, _, _ in covered))
    targets = list(dict.fromkeys(target for _, target, _ in covered))
    gpus = [target for target in targets if not target.startswith("tpu")]
    by_hand = ("D-Sync by hand", "D-Sync by hand, defaults")
    programs = [("pipelined",), ("two-shot",), ("D-Sync",), by_hand]
    programs += [("naive, defaults",), ("negative control",)]
    for model in models:
        cells = []
        for best_of in programs:
            values = [max(covered[model, gpu, p] for p in best_of) for gpu in gpus]
            cells.append(f"{min(values):.2f} - {max(values):.2f}")
        yield f"| {model} | " + " | ".join(cells) + " |"
    for target in targets:
        if target not in gpus:
            cells = [(model, target, "pipelined") for model in models]
            values = [covered[cell] for cell in cells if cell in covered]
            yield f"| {target} | " + " | ".join(f"{x:.2f}" for x in values) + " |"


def words_on_d_sync():
    """Yields by how much `width=1` is behind, and the best with XLA's options."""
    found = {}
    for cell in result("overlap")["cells"]:
        names = cell["target"], cell["model"]
        found.setdefault(names, {})[cell["program"]] = cell["covered"]
    by_hand = ("D-Sync by hand", "D-Sync by hand, defaults")
    behind = [max(x[p] for p in by_hand) - x["D-Sync"] for x in found.values()]
    assert 0.004 < max(behind) <= 0.005
    yield "`width=1` covers at most 0.005 less than the best step by hand"
    most = max(x["D-Sync by hand, defaults"] for x in found.values())
    yield f"XLA's default options, which\n  reaches at most {most:.2f}"


def unsharded():
    """Returns the cells of steps whose optimizer is not sharded."""
    cells = result("memory")["cells"]
    return [cell for cell in cells if "sharded" not in cell["step"]]


def rows_of_memory():
    """Yields a row for each model: pipejax's memory, and that by hand in brackets."""
    cells = unsharded()
    for model in dict.fromkeys(cell["model"] for cell in cells):
        shown = []
        for cell in cells:
            if cell["model"] == model:
                hand = cell["by_hand"]
                by_hand = "" if hand is None else f" ({hand:.2f})"
                shown.append(f"{cell['live']:.2f}{by_hand}")
        yield f"| {model} | " + " | ".join(shown) + " |"


def words_on_memory():
    """Yields the most that a step needs beside one by hand, and for error feedback."""
    cells = {(x["model"], x["step"]): x for x in unsharded()}
    assert all(cell["met"] for cell in cells.values())
    most = max(cell["over_by_hand"] or 0 for cell in cells.values())
    yield f"no step needs more than {most:.2f} times the\nmemory of the step by hand"
    assert not any(_needs_more(cells, m) for m, s in cells if s == "K=2, int8")
    yield "int8 needs less memory in every model"
    fed = cells["deep mlp", "K=2, int8 with feedback"]["live"]
    plain = cells["deep mlp", "K=2, int8"]["live"]
    yield f"{fed - plain:.1f} copies more"


def _needs_more(cells, model):
    return cells[model, "K=2, int8"]["live"] > cells[model, "K=2, plain"]["live"]


@pytest.mark.parametrize(
    "found", [rows_of_overlap, words_on_d_sync, rows_of_memory, words_on_memory]
)
def test_figures_equal_the_result_files(found):
    assert_shown("docs/overlap.md", found())
