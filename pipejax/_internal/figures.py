"""Figures with matplotlib, which pipejax does not require."""

from typing import Any


def new_figure(**settings: Any) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("pip install 'pipejax[demo]'") from None
    return Figure(**settings)
