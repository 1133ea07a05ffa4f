"""Programs that the command line names as `MODULE:FUNCTION`."""

import importlib
import pathlib
import sys
from collections.abc import Callable
from typing import Any

from ._usage import UsageError


def load(name: str) -> Callable[[Any], Any]:
    """Imports and returns the function that is called `MODULE:FUNCTION`.

    MODULE can be imported from the current folder, or is the path of a `.py` file.
    """
    where, _, attribute = name.rpartition(":")
    if not where or not attribute:
        raise UsageError(f"the program must be MODULE:FUNCTION, got {name!r}")
    file = pathlib.Path(where)
    is_file = file.suffix == ".py"
    if where.startswith(".") and not is_file:
        raise UsageError(f"the module must be named from its root, got {where!r}")
    if is_file and not file.is_file():
        raise UsageError(f"there is no file {where!r}")
    folder = str(file.resolve().parent if is_file else pathlib.Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(file.stem if is_file else where)
    except SyntaxError as error:
        raise UsageError(f"{where!r} must be Python: {error}") from error
    except ModuleNotFoundError as error:
        if not f"{where}.".startswith(f"{error.name}."):
            raise  # the module itself imports one that is missing
        raise UsageError(
            f"there is no module {where!r}, neither in this folder nor installed"
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise UsageError(f"{where!r} has no function {attribute!r}")
    return function


def types(returned: Any) -> str:
    parts = returned if isinstance(returned, tuple) else (returned,)
    names = ", ".join(type(part).__name__ for part in parts)
    return f"({names})" if isinstance(returned, tuple) else names
