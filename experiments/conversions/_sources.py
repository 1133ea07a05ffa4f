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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import flax.training.checkpoints  # noqa: F401  looks for TensorFlow, not a stub
import jax


def load(
    folders: Sequence[pathlib.Path],
    names: Sequence[str],
    stubs: Sequence[str] = (),
    *,
    stay: bool = False,
) -> list[Any]:
    """Imports modules of a program. Another program may use the same names.

    Args:
      folders: The folders in which the program finds its modules.
      names: Names of the modules.
      stubs: Names of packages, and of their modules, that are replaced by stubs.
      stay: Whether the modules stay in `sys.modules`, for a program whose functions
        import some of them again.

    Returns:
      The modules.
    """
    for name in ("map", "leaves"):  # as they were when the programs were written
        if not hasattr(jax, f"tree_{name}"):
            setattr(jax, f"tree_{name}", getattr(jax.tree, name))
    with _first_in_path(folders), _stubbed(stubs):
        found = [importlib.import_module(name) for name in names]
        for name, module in list(sys.modules.items()):
            file = pathlib.Path(getattr(module, "__file__", None) or "/")
            if not stay and any(file.is_relative_to(folder) for folder in folders):
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
    lines: Mapping[str, str] | None = None,
) -> Any:
    """Compiles one function of a program by itself, also one inside of another.

    Args:
      source: The text of the file.
      name: The name of the function.
      names: The names that the function uses, and their values.
      before: The beginning of the statement of the function at which it is cut off.
      returns: The expression that the function returns if it is cut off.
      lines: The beginnings of statements that are replaced, also in functions inside of
        this one, and what stands in their place. Each must be found once.

    Returns:
      The function, without its decorators.
    """
    (found,) = (
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == name
    )
    found.decorator_list = []
    for begin, line in (lines or {}).items():
        replaced = _Replaced(begin, line)
        replaced.visit(found)
        if replaced.count != 1:
            raise ValueError(f"{replaced.count} statements begin with {begin!r}.")
    if before:
        texts = [ast.unparse(statement) for statement in found.body]
        (end,) = (i for i, text in enumerate(texts) if text.startswith(before))
        found.body = [*found.body[:end], *ast.parse(f"return {returns}").body]
    module = ast.fix_missing_locations(ast.Module([found], []))
    names = dict(names)
    later = __future__.annotations.compiler_flag  # annotations are not evaluated
    exec(compile(module, name, "exec", flags=later, dont_inherit=True), names)
    return names[name]


class _Replaced(ast.NodeTransformer):
    """Replaces a statement, which is found by its beginning, and counts how often."""

    def __init__(self, begin: str, line: str) -> None:
        self.begin, self.line, self.count = begin, line, 0

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.stmt) and ast.unparse(node).startswith(self.begin):
            self.count += 1
            return ast.parse(self.line).body
        return self.generic_visit(node)


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
        return mock.MagicMock() if name[0].islower() else _Base


class _Base:
    """A class that can be made of anything."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass
