"""Pictures, where matplotlib is installed; it is no part of the light core."""

from typing import Any


def new_figure(**settings: Any) -> Any:
    """A `matplotlib.figure.Figure`, that no window shows.

    Raises:
      ImportError: without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("pip install 'pipejax[demo]'") from None
    return Figure(**settings)
