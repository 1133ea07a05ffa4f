"""Writes the tables of the documents from the result files.

A table stands between two comments, `<!-- table: NAME -->` and `<!-- end -->`. The name
is one of those in `experiments/tables/_all.py`, which says how each table is made. Text
outside of the comments stays as it is.

Command: python -m experiments.tables; with --check, to write nothing and to fail if a
document differs
Time: about 10 seconds.
Result: the tables of README.md and of all pages in docs/
"""

import dataclasses
import pathlib
import sys

import jax
import tyro

from . import _documents

ROOT = pathlib.Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the program."""

    check: bool = False
    """Write nothing, and only say which tables differ."""
    root: pathlib.Path = ROOT
    """The folder that README.md and docs/ are in."""


def main(config: Config) -> int:
    """Writes all tables, or checks them.

    Returns:
      The exit code, which is 1 if a check has found a difference.
    """
    jax.config.update("jax_platforms", "cpu")
    paths = [config.root / "README.md", *sorted(config.root.glob("docs/**/*.md"))]
    updated = {path: _documents.with_tables(path.read_text()) for path in paths}
    for path, (text, changed) in updated.items():
        for name in changed:
            where = f"{path.relative_to(config.root)}, table {name}"
            differs = "differs from its result file; run python -m experiments.tables"
            print(f"{where}: {differs if config.check else 'written'}")
        if changed and not config.check:
            path.write_text(text)
    return int(config.check and any(changed for _, changed in updated.values()))


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Config, description=__doc__)))
