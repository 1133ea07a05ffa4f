"""Tests that programs print text unchanged, including square brackets."""

import io
import pathlib
import re

import experiments
from experiments import loop, report, speedup

TEXT = "pip install 'pipejax[peers]' [bold] [/tmp/x] :x:"


def test_text_and_tables_are_printed_without_markup():
    said = io.StringIO()
    console = report.console(file=said, width=200)
    console.print(TEXT)
    console.print(report.table(TEXT, [[TEXT, "b"], [TEXT, "c"]]))
    assert said.getvalue().count(TEXT) == 4


def test_progress_bar_shows_its_label_without_markup():
    said = io.StringIO()
    console = report.console(
        file=said, width=200, force_terminal=True, color_system=None
    )
    with loop._progress(console) as progress:
        progress.add_task(TEXT, total=3, rate="", loss="")
    assert TEXT in said.getvalue()


def test_missing_peer_is_reported_with_its_extra(monkeypatch, capsys):
    """Shows a row of `speedup` whose peer is not installed."""
    why = "PyTorch is not installed: pip install 'pipejax[peers]'"
    cell = {
        "problem": {"model": "mlp", "batch_size": 64},
        "rate": "500mbit",
        "rows": {"compute": {**dict.fromkeys(("step", "wire", "cores", "limit"), 1.0)}},
        "measured": {},
        "missing": {"DDP": why},
    }
    cell["rows"]["compute"] |= {
        "ratio_to_limit": 1.0,
        "ratio_to_compute": 1.0,
        "faster_than": {},
    }
    speedup.show(cell)
    assert f"DDP: {why}\n" in capsys.readouterr().out


def test_every_console_is_made_in_one_place():
    """A console of rich's own would read square brackets as markup."""
    folder = pathlib.Path(experiments.__path__[0])
    made = re.compile(r"\bConsole\(|from rich import print|rich\.print")
    files = {path for path in folder.rglob("*.py") if made.search(path.read_text())}
    assert files == {folder / "report.py"}
