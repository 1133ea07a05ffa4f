"""Tests figures without a window, and the message if matplotlib is missing."""

import sys

import pytest

from pipejax._internal.figures import new_figure


def test_figure_has_its_settings_and_no_window(monkeypatch):
    """`pyplot` would choose a window system, and keep each figure until closed."""
    figure = pytest.importorskip("matplotlib.figure")
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # makes an import fail
    made = new_figure(figsize=(3, 2), dpi=50)
    assert type(made) is figure.Figure
    assert made.get_size_inches().tolist() == [3, 2]
    assert made.get_dpi() == 50


def test_missing_matplotlib_is_reported_with_its_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"^pip install 'pipejax\[demo\]'$"):
        new_figure()
