"""Replaces the tables of a document."""

import re

from ._all import TABLES, Table

_BEGIN = "<!-- table: "
_PLACE = re.compile(rf"^{_BEGIN}(\S+) -->\n((?:\|.*\n)*)<!-- end -->$", re.MULTILINE)


def with_tables(text: str) -> tuple[str, list[str]]:
    """Returns a document with new tables, and the names of those that have changed.

    Raises:
      ValueError: If a table has an unknown name, or anything but a table stands between
        the two comments.
    """
    places = list(_PLACE.finditer(text))
    if len(places) != text.count(_BEGIN):
        raise ValueError(
            "`<!-- table: NAME -->` must be followed by a table or nothing, and then by"
            f" `<!-- end -->`: got {text.count(_BEGIN)} beginnings, and"
            f" {len(places)} of them with an end"
        )
    changed = []
    for place in reversed(places):
        name, old = place.groups()
        if name not in TABLES:
            raise ValueError(f"`NAME` must be one of {sorted(TABLES)}: got {name}")
        if (new := markdown(TABLES[name]())) != old:
            text = text[: place.start(2)] + new + text[place.end(2) :]
            changed.append(name)
    return text, changed[::-1]


def markdown(table: Table) -> str:
    """Returns a Markdown table. The first row of `table` holds the titles."""
    titles, *others = [f"| {' | '.join(cells)} |\n" for cells in table]
    return "".join([titles, "|" + " --- |" * len(table[0]) + "\n", *others])
