"""What XLA schedules under an all-reduce."""

from .results import assert_shown, result


def rows_of_overlap():
    """On GPUs the least and greatest over targets; on TPUs one row each."""
    covered = {
        (cell["model"], cell["target"], cell["program"]): cell["covered"]
        for name in ("overlap", "overlap_tpu")
        for cell in result(name)["cells"]
    }
    models = list(dict.fromkeys(model for model, _, _ in covered))
    targets = list(dict.fromkeys(target for _, target, _ in covered))
    gpus = [target for target in targets if not target.startswith("tpu")]
    by_hand = ("D-Sync", "D-Sync by hand", "D-Sync by hand, defaults")
    programs = [("pipelined",), ("two-shot",), by_hand]
    programs += [("naive, defaults",), ("negative control",)]
    for model in models:
        cells = []
        for best_of in programs:
            values = [max(covered[model, gpu, p] for p in best_of) for gpu in gpus]
            cells.append(f"{min(values):.2f} - {max(values):.2f}")
        yield f"| {model} | " + " | ".join(cells) + " |"
    for target in targets:
        if target not in gpus:
            values = [covered[model, target, "pipelined"] for model in models]
            yield f"| {target} | " + " | ".join(f"{x:.2f}" for x in values) + " |"


def test_figures_are_those_of_the_result_files():
    assert_shown("docs/overlap.md", rows_of_overlap())
