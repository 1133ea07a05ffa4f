"""Tests what the document says about schedules and memory."""

from experiments.report import result
from experiments.tables._overlap import unsharded

from .quoted import quoted_in


@quoted_in("docs/overlap.md")
def test_d_sync_is_behind_by_quoted_amount():
    found = {}
    for cell in result("overlap")["cells"]:
        names = cell["target"], cell["model"]
        found.setdefault(names, {})[cell["program"]] = cell["covered"]
    by_hand = ("D-Sync by hand", "D-Sync by hand, defaults")
    behind = [max(x[p] for p in by_hand) - x["D-Sync"] for x in found.values()]
    assert 0.004 < max(behind) <= 0.005
    yield "`width=1` covers at most 0.005 less than the best step by hand"
    most = max(x["D-Sync by hand, defaults"] for x in found.values())
    yield f"XLA's default options, which reaches at most {most:.2f}"


@quoted_in("docs/overlap.md")
def test_memory_beside_step_by_hand_is_quoted():
    cells = {(x["model"], x["step"]): x for x in unsharded()}
    assert all(cell["met"] for cell in cells.values())
    most = max(cell["over_by_hand"] or 0 for cell in cells.values())
    yield f"no step needs more than {most:.2f} times the memory of the step by hand"
    for model in {model for model, _ in cells}:
        eight, plain = (cells[model, f"K=2, {x}"]["live"] for x in ("int8", "plain"))
        assert eight <= plain, model
    yield "int8 needs less memory in every model"
    names = ("K=2, int8 with feedback", "K=2, int8")
    fed, plain = (cells["deep mlp", name]["live"] for name in names)
    yield f"{fed - plain:.1f} copies more"
