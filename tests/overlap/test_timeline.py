"""Tests the picture of a schedule: where things are drawn, and that it is drawn."""

import sys

import pytest

from pipejax._internal.hlo._report import Item
from pipejax.overlap import inspect
from pipejax.overlap._timeline import _HAIRS, _at, _edges, _lanes, timeline

from . import HIDDEN, program


@pytest.fixture
def report():
    return inspect(program(HIDDEN))


def scheduled(*items):
    """Returns a report whose schedule has exactly these items."""
    text = program("ROOT %r = f32[100] bitcast(%x)")
    return inspect(text)._replace(schedule=tuple(Item(*item) for item in items))


def test_kernels_are_as_wide_as_their_flops():
    """Widths are 1/4, two hairs of h/2 and 3/4, scaled to end at 1."""
    kernels = ("matmul", 25.0), ("other", 0.0), ("other", 0.0), ("matmul", 75.0)
    edges, done = _edges(
        scheduled(
            *(("k", kind, flops, i, i + 1) for i, (kind, flops) in enumerate(kernels))
        )
    )
    whole = 1 + _HAIRS
    wanted = [0, 0.25, 0.25 + _HAIRS / 2, 0.25 + _HAIRS, whole]
    assert edges == pytest.approx([edge / whole for edge in wanted])
    assert done == pytest.approx([0, 0.25, 0.25, 0.25, 1])
    # Ticks count only FLOPs: a quarter is done before the hairs, half inside the last
    # one.
    assert _at(0.0, edges, done) == 0
    assert _at(0.25, edges, done) == pytest.approx(0.25 / whole)
    assert _at(0.5, edges, done) == pytest.approx((0.5 + _HAIRS) / whole)
    assert _at(1.0, edges, done) == pytest.approx(1)


def test_overlapping_collectives_have_separate_lanes():
    found = _lanes(
        scheduled(
            ("m", "matmul", 1.0, 0, 1),
            ("first", "all-reduce", 0.0, 0, 4),
            ("second", "all-gather", 0.0, 2, 6),
            ("waits", "all-reduce", 0.0, 4, 4),
            ("beside", "all-reduce", 0.0, 4, 5),
        )
    )
    # The third one begins as the first ends. One that is waited for still takes a lane.
    assert [(item.name, lane) for item, lane in found] == [
        *(("first", 0), ("second", 1), ("waits", 0), ("beside", 2)),
    ]


def test_timeline_is_drawn_for_one_or_several_reports(report, tmp_path):
    pytest.importorskip("matplotlib")
    timeline(report, tmp_path / "one.png")
    nothing = inspect(program("ROOT %r = f32[100] bitcast(%x)"))
    timeline({"hidden": report, "empty": nothing}, tmp_path / "two.svg")
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "two.svg").read_text()
    assert "hidden: 100% of the FLOPs under communication" in text
    assert "empty: no collectives" in text


def test_timeline_without_matplotlib_names_the_install_command(
    report, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"^pip install 'pipejax\[demo\]'$"):
        timeline(report, tmp_path / "one.png")
