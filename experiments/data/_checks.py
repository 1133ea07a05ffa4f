"""What is asked of arguments and of the environment, with the remedy in the message."""

import importlib


def check(rule: bool, message: str) -> None:
    """Raise ValueError with `message` unless `rule` holds."""
    if not rule:
        raise ValueError(message)


def require(*modules: str) -> None:
    """Raise ImportError, with the line that installs it, for a missing module."""
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ImportError(
                f"this data set needs the package {module}: pip install 'pipejax[data]'"
            ) from error
