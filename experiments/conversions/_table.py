"""Makes the table of docs/benchmarks/optimizers.md."""

from typing import Any


def programs(found: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Returns titles, then a row for every program.

    Args:
      found: The rows of the result file, by the name of the program.
    """
    titles = (
        *("program", "width 1", "width 2", "loss, width 1", "loss, width 2"),
        *("largest parameter", "moved", "lines"),
    )
    return [list(titles), *([name, *_cells(row)] for name, row in found.items())]


def _cells(row: dict[str, Any]) -> list[str]:
    widths = [row["width 1"], row["width 2"]]
    return [
        *(
            f"{_number(width[part])} / {_number(width['rounding'][part])}"
            for part in ("params", "reported")
            for width in widths
        ),
        f"{row['scale']:.2f}",
        f"{row['moved']:.1e}",
        f"{len(row['changed'])} + {len(row['around'])}",
    ]


def _number(x: float) -> str:
    return f"{x:.1e}" if x else "0"
