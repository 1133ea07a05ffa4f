"""Checks arguments and the environment, with the remedy in each error message."""

import importlib


def check(rule: bool, message: str) -> None:
    """Raises a `ValueError` with `message` unless `rule` holds."""
    if not rule:
        raise ValueError(message)


def require(*modules: str) -> None:
    """Raises an `ImportError` that says how to install a module if it is missing."""
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ImportError(
                f"this data set needs the package {module}: pip install 'pipejax[data]'"
            ) from error
