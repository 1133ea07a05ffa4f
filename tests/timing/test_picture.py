"""Tests pictures: what they show, and that a file is written."""

import pytest

from pipejax import timing
from pipejax.timing import _picture

PHASES = timing.Profile._fields


@pytest.fixture
def figures(monkeypatch):
    """Collects all figures that are made."""
    made, new = [], _picture.new_figure
    monkeypatch.setattr(
        _picture, "new_figure", lambda **given: made.append(new(**given)) or made[-1]
    )
    return made


def test_profile_picture_is_written_as_png(tmp_path):
    pytest.importorskip("matplotlib")
    each = timing.Profile(*(0.001 * i for i in range(7)))
    path = tmp_path / "profile.png"
    panel = timing.Panel("4 hosts", {"ring": each, "tree": each}, {"ring": 0.01})
    timing.profile_picture([panel, panel._replace(limits={})], path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_phases_follow_one_another_in_milliseconds(tmp_path, figures):
    pytest.importorskip("matplotlib")
    seconds = [0.001 * (i + 1) for i in range(len(PHASES))]
    ring, tree = timing.Profile(*seconds), timing.Profile(*(2 * x for x in seconds))
    panel = timing.Panel("4 hosts", {"ring": ring, "tree": tree}, {"tree": 0.01})
    timing.profile_picture([panel], tmp_path / "profile.svg")
    (axes,) = figures[0].axes
    assert axes.get_title() == "4 hosts"
    for i, bars in enumerate(axes.containers):
        # Bar i starts after 1 + 2 + ... + i milliseconds, and in the tree after twice
        # as many.
        before = i * (i + 1) / 2
        assert [bar.get_x() for bar in bars] == pytest.approx([before, 2 * before])
        assert [bar.get_width() for bar in bars] == pytest.approx([i + 1, 2 * (i + 1)])
    labels = [bars.get_label().removesuffix(" exchange") for bars in axes.containers]
    assert labels == list(PHASES)
    (limit,) = axes.lines  # the limit of the tree, in the second place
    assert list(limit.get_xdata()) == [10, 10]
    assert list(limit.get_ydata()) == [0.6, 1.4]


def test_panels_are_drawn_in_columns(tmp_path, figures):
    pytest.importorskip("matplotlib")
    each = timing.Profile(*[0.001] * len(PHASES))
    panels = [timing.Panel(str(i), {f"a{i // 2}": each}, {}) for i in range(3)]
    timing.profile_picture(panels, tmp_path / "profile.svg", columns=2)
    assert [axes.get_title() for axes in figures[0].axes] == ["0", "1", "2"]
    places = [axes.get_subplotspec() for axes in figures[0].axes]
    assert [(x.rowspan.start, x.colspan.start) for x in places] == [
        (0, 0),
        (0, 1),
        (1, 0),
    ]


def test_scaling_picture_has_a_curve_for_each_way(tmp_path, figures):
    pytest.importorskip("matplotlib")
    curves = {"width 1": {1: 1.0, 2: 0.5}, "width 2": {1: 1.0, 2: 0.9, 4: 0.8}}
    path = tmp_path / "scaling.png"
    timing.picture(curves, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    (axes,) = figures[0].axes
    drawn = {
        line.get_label(): dict(zip(*line.get_data(), strict=True))
        for line in axes.lines
    }
    assert drawn == curves
