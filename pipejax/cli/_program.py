"""Programs that the command line names as `MODULE:FUNCTION`."""

import importlib
import importlib.util
import pathlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ._usage import UsageError


def load(name: str) -> Callable[[Any], Any]:
    """Imports and returns the function that is called `MODULE:FUNCTION`.

    MODULE can be imported from the current folder, or is the path of a `.py` file. The
    file runs even if another module has its name.
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
    sys.path[:] = [folder, *(path for path in sys.path if path != folder)]
    try:
        module = _run(file) if is_file else importlib.import_module(where)
    except SyntaxError as error:
        raise UsageError(f"{where!r} must be Python: {error}") from error
    except ModuleNotFoundError as error:
        if is_file or not f"{where}.".startswith(f"{error.name}."):
            raise  # the module itself imports one that is missing
        raise UsageError(
            f"there is no module {where!r}, neither in this folder nor installed"
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise UsageError(f"{where!r} has no function {attribute!r}")
    return function


def _run(file: pathlib.Path) -> ModuleType:
    """Runs a file as a module under a name that no other module has."""
    # The name of the file may be that of a module which is imported, and has dots in
    # `model.v2.py`.
    name = f"pipejax:{file.stem}"
    # `None` is only for files that do not end in .py.
    spec: Any = importlib.util.spec_from_file_location(name, file.resolve())
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def types(returned: Any) -> str:
    parts = returned if isinstance(returned, tuple) else (returned,)
    names = ", ".join(type(part).__name__ for part in parts)
    return f"({names})" if isinstance(returned, tuple) else names
