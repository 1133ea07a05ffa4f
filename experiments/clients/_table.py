"""Makes the tables of docs/benchmarks/optimizers.md."""

from typing import Any

Found = dict[str, dict[str, Any]]


def programs(found: Found, title: str = "program") -> list[list[str]]:
    """Returns titles, then a row for every client: difference / bound for every way.

    Args:
      found: The outputs of `compared`, by the name of the client.
      title: The title of the first column.
    """
    ways = list(next(iter(found.values()), {}))
    return [
        [title, *ways],
        *([name, *(_cell(row[way]) for way in ways)] for name, row in found.items()),
    ]


def optimizers(found: Found) -> list[list[str]]:
    """Returns the same table for optimizers."""
    return programs(found, "optimizer")


def refusals(found: Found) -> list[list[str]]:
    """Returns titles, then a row for every error message that refuses a client."""
    table = [["refused", "where", "what pipejax says"]]
    for name, row in found.items():
        messages: dict[str, list[str]] = {}
        for way, cell in row.items():
            if "refused" in cell:
                messages.setdefault(cell["refused"], []).append(way)
        for message, ways in messages.items():
            where = "everywhere" if len(ways) == len(row) else ", ".join(ways)
            table.append([name, where, message])
    return table


def _cell(found: dict[str, Any]) -> str:
    if "refused" in found:
        return "refused"
    difference, bound = found["params"]["difference"], found["params"]["bound"]
    return f"{difference:.1e} / {bound:.1e}" if difference else f"0 / {bound:.1e}"
