"""Makes the table of all result files."""

from typing import Any

from experiments.report import RESULTS, result

_PLACE = "../../experiments/results"  # from docs/benchmarks


def table() -> list[list[str]]:
    """Returns a row for each result file: its program, and what the program ran on."""
    rows = [["result", "program", "ran on", "JAX", "date"]]
    for path in sorted(RESULTS.glob("*.json")):
        record = result(path.stem)
        program = record["command"].split()[2]
        rows.append(
            [
                f"[{path.stem}]({_PLACE}/{path.name})",
                f"`python -m {program}`",
                _machine(record),
                record["versions"]["jax"],
                record["date"],
            ]
        )
    return rows


def _machine(record: dict[str, Any]) -> str:
    """Returns the accelerator, or the cores and the vector extension of the CPU."""
    count, _, device = record["device"].partition(" x ")
    if device != "cpu":
        return f"{count} {device}"
    cpu = record.get("cpu")
    if cpu is None:
        return "CPU, not recorded"
    return f"{cpu['cores']} cores of {cpu['model']}, {cpu['vectors']}"
