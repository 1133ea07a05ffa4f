"""Figures with matplotlib, which pipejax does not require."""

from typing import Any


def new_figure(**settings: Any) -> Any:
    """Returns a `matplotlib.figure.Figure` that is not shown in a window.

    Args:
      **settings: Keyword arguments of `matplotlib.figure.Figure`.

    Raises:
      ImportError: If matplotlib is not installed. The message says how to install it.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("pip install 'pipejax[demo]'") from None
    return Figure(**settings)
