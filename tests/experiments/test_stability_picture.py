"""Tests pictures of stable regions."""

import numpy as np
import optax
import pytest

from experiments.convex import _picture


def test_picture_draws_a_line_for_each_width(monkeypatch):
    pytest.importorskip("matplotlib")
    # The default has 100 values.
    monkeypatch.setattr(_picture, "_MOMENTA", np.linspace(0, 0.99, 12))
    families = {
        "heavy-ball": lambda rate, momentum, width: optax.sgd(rate, momentum),
        "Nesterov": lambda rate, momentum, width: optax.sgd(rate, momentum, True),
    }
    figure = _picture.picture(families, widths=(1, 2))
    assert [axes.get_title() for axes in figure.axes] == [
        "heavy-ball, weight prediction (the default)",
        "heavy-ball, plain delay",
        "Nesterov",
    ]
    assert [len(axes.lines) for axes in figure.axes] == [2, 2, 2]
    predicted, plain = (axes.lines[1].get_ydata() for axes in figure.axes[:2])
    assert (predicted[1:] > plain[1:]).all()
    heavy = figure.axes[1].lines[1]
    np.testing.assert_allclose(heavy.get_ydata(), 1 - heavy.get_xdata(), rtol=1e-4)
