"""Takes functions out of the files of a program, without changing or copying them.

Nothing of a program is kept here. Its modules are imported from a clone that the user
has made. Packages that a training step does not need, such as a data loader or a
logger, are replaced by empty stubs while the modules are imported.
"""

import __future__

import ast
import contextlib
import importlib
import json
import pathlib
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import flax.training.checkpoints  # noqa: F401  looks for TensorFlow, not a stub
import jax


def load(
    folders: Sequence[pathlib.Path], names: Sequence[str], stubs: Sequence[str] = ()
) -> list[Any]:
    """Imports modules of a program. Another program may use the same names.

    Args:
      folders: The folders in which the program finds its modules.
      names: Names of the modules.
      stubs: Names of packages, and of their modules, that are replaced by stubs.

    Returns:
      The modules. They are not left in `sys.modules`.
    """
    if not hasattr(jax, "tree_map"):  # as it was when the programs were written
        setattr(jax, "tree_map", jax.tree.map)  # noqa: B010  types do not know it
    with _first_in_path(folders), _stubbed(stubs):
        found = [importlib.import_module(name) for name in names]
        for name, module in list(sys.modules.items()):
            file = pathlib.Path(getattr(module, "__file__", None) or "/")
            if any(file.is_relative_to(folder) for folder in folders):
                del sys.modules[name]
    return found


def notebook(path: pathlib.Path, stubs: Sequence[str] = ()) -> tuple[str, Any]:
    """Runs the cells of a notebook that define something.

    Returns:
      The text of these cells, and a namespace with what they define.
    """
    cells = json.loads(path.read_text())["cells"]
    texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    source = "\n".join(text for text in texts if "= main(" not in text)
    module = types.ModuleType(path.stem)
    with _stubbed(stubs):
        exec(compile(source, path.name, "exec"), vars(module))
    return source, module


def function(
    source: str,
    name: str,
    names: dict[str, Any],
    *,
    before: str = "",
    returns: str = "",
) -> Any:
    """Compiles one function of a program by itself, also one inside of another.

    Args:
      source: The text of the file.
      name: The name of the function.
      names: The names that the function uses, and their values.
      before: The beginning of the statement of the function at which it is cut off.
      returns: The expression that the function returns if it is cut off.

    Returns:
      The function, without its decorators.
    """
    (found,) = (
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == name
    )
    found.decorator_list = []
    if before:
        texts = [ast.unparse(statement) for statement in found.body]
        (end,) = (i for i, text in enumerate(texts) if text.startswith(before))
        found.body = [*found.body[:end], *ast.parse(f"return {returns}").body]
    module = ast.fix_missing_locations(ast.Module([found], []))
    names = dict(names)
    later = __future__.annotations.compiler_flag  # annotations are not evaluated
    exec(compile(module, name, "exec", flags=later, dont_inherit=True), names)
    return names[name]


@contextlib.contextmanager
def _first_in_path(folders: Sequence[pathlib.Path]) -> Iterator[None]:
    sys.path[:0] = map(str, folders)
    try:
        yield
    finally:
        del sys.path[: len(folders)]


@contextlib.contextmanager
def _stubbed(names: Sequence[str]) -> Iterator[None]:
    stubs = {name: _Stub(name) for name in names}
    kept = {name: sys.modules.get(name) for name in names}
    sys.modules.update(stubs)
    try:
        yield
    finally:
        for name, module in kept.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


class _Stub(types.ModuleType):
    """A module that has everything: modules, functions and base classes."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock() if name[0].islower() else object
