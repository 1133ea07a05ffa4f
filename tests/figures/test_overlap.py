"""Tests what the documents say about schedules, memory and compile time."""

from experiments.report import result
from experiments.tables._overlap import unsharded

from .quoted import quoted_in


def test_synchronous_step_hides_nearly_as_much_as_the_best_step_by_hand():
    found = {}
    for cell in result("overlap")["cells"]:
        names = cell["target"], cell["model"]
        found.setdefault(names, {})[cell["program"]] = cell["covered"]
    by_hand = ("D-Sync by hand", "D-Sync by hand, defaults")
    assert all(
        max(x[p] for p in by_hand) - x["D-Sync"] <= 0.005 for x in found.values()
    )


@quoted_in("docs/benchmarks/memory.md")
def test_memory_beside_step_by_hand_is_quoted():
    cells = {(x["model"], x["step"]): x for x in unsharded()}
    assert all(cell["met"] for cell in cells.values())
    most = max(cell["over_by_hand"] or 0 for cell in cells.values())
    yield f"no step needs more than {most:.2f} times the memory of the step by hand"
    for model in {model for model, _ in cells}:
        eight, plain = (cells[model, f"K=2, {x}"]["live"] for x in ("int8", "plain"))
        assert eight <= plain, model
    yield "int8 needs less memory in every model"
    extra = [x["feedback"] for (_, step), x in cells.items() if "feedback" in step]
    copies = f"{min(extra):.2f} to {max(extra):.2f} copies"
    yield f"one copy of the gradients, its residual ({copies})"


@quoted_in("docs/benchmarks/compile_time.md")
def test_tracing_and_compilation_are_quoted():
    leaves, steps = list(result("compile_time")["leaves"].items())[-1]
    traced, compiled = (
        [f"{steps[name][phase]:.1f} s" for name in steps if "predicted" in name]
        for phase in ("trace", "compile")
    )
    (hand, ours), (hand_compiled, ours_compiled) = traced, compiled
    yield f"With {leaves} arrays, tracing takes {ours} and compilation {ours_compiled}"
    yield f"against {hand} and {hand_compiled} by hand with prediction"
