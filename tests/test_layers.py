"""
Tests who imports whom: lower layers nothing of higher ones, and no module in a circle.

A layer is a package, or for private code a folder or module of `_core`.
"""

import ast
import pathlib

ROOT = pathlib.Path(__file__).parents[1]

# From the lowest to the highest. A layer imports only layers that stand before it.
LAYERS = [
    "_internal",
    "codecs",
    "collectives",
    *("_core.message", "_core.partitioned", "_core.prediction"),
    *("_core.checks", "_core.replicas", "_core.step", "_core.rounds"),
    "_core.executors",
    "train_step",
    *("transforms", "stability", "problems"),
    *("overlap", "timing", "launch"),
    "",  # `import pipejax`, without what needs optional dependencies
    *("checkpoint", "flax"),
    "cli",
]

# Modules that import private modules of another package, with the reason.
IMPORT_PRIVATE = {
    "pipejax/cli/_launch.py": "`pipejax launch` is the command line of pipejax.launch",
}


def modules():
    """Returns all modules but `__init__` and `__main__`, as paths from the root."""
    found = (ROOT / "pipejax").rglob("*.py")
    return {
        path.relative_to(ROOT).as_posix()
        for path in found
        if not path.name.startswith("__")
    }


def imported(path, text):
    """Returns the full names of the modules that a file imports.

    Relative names are resolved from the file's folder. `from a import b` counts as `a`
    and as `a.b`, which may be a module.
    """
    folder = pathlib.PurePosixPath(path).parent.parts
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = folder[: len(folder) + 1 - node.level] if node.level else ()
            where = ".".join([*base, *([node.module] if node.module else [])])
            names |= {where} | {f"{where}.{alias.name}" for alias in node.names}
    return names


def test_imports_are_found_in_all_their_forms():
    text = "import a.b\ndef f():\n    from ..c import d\n    from . import e"
    assert imported("tests/flax/twin.py", text) == {
        *("a.b", "tests.c", "tests.c.d", "tests.flax", "tests.flax.e")
    }


def layer_of(name):
    """Returns the layer of a module, from its full name."""
    inside = name.split(".")[1:]
    if inside == ["__main__"]:  # `python -m pipejax` is the command line
        return "cli"
    deep = 2 if inside[:1] == ["_core"] else 1
    found = ".".join(inside[:deep])
    return found if found in LAYERS else ""


def name_of(path):
    """Returns the full name of the module in a file."""
    parts = pathlib.PurePosixPath(path).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def graph():
    """Returns for each module of pipejax which of its modules it imports.

    Imports inside functions count.
    """
    paths = {p.relative_to(ROOT).as_posix() for p in (ROOT / "pipejax").rglob("*.py")}
    names = {name_of(path) for path in paths}
    found = {}
    for path in paths:
        wanted = imported(path, (ROOT / path).read_text()) & names
        # `from a import b` needs `a` itself only if `b` is no module of it.
        above = {name.rpartition(".")[0] for name in wanted}
        found[name_of(path)] = {
            name
            for name in wanted - {name_of(path)}
            if name not in above or not name_of(path).startswith(name)
        }
    return found


def test_no_layer_imports_a_higher_one():
    upwards = {
        (name, other)
        for name, others in graph().items()
        for other in others
        if LAYERS.index(layer_of(other)) > LAYERS.index(layer_of(name))
    }
    assert upwards == set()


def test_no_modules_import_each_other_in_a_circle():
    left = graph()
    while free := {name for name, others in left.items() if not others & left.keys()}:
        left = {name: others for name, others in left.items() if name not in free}
    assert left == {}


def test_every_layer_contains_a_module():
    assert {layer_of(name) for name in graph()} == {*LAYERS}


def test_no_package_imports_private_modules_of_another():
    """Code that two packages need is public, or is a module of its own."""
    found = set()
    for module in modules():
        for name in imported(module, (ROOT / module).read_text()):
            top, *inside = name.split(".")
            private = any(part.startswith("_") for part in inside[1:])
            other = layer_of(name) != layer_of(name_of(module))
            if top == "pipejax" and private and other:
                found.add(module)
    assert found == IMPORT_PRIVATE.keys()
