"""
Tests that each module has a test of its name, and who imports whom.

`pipejax/<package>/_<module>.py` is tested in `tests/<package>/test_<module>.py`. Files
of other names test several modules together.
"""

import ast
import pathlib

ROOT = pathlib.Path(__file__).parents[1]

# Modules that have nothing to test by themselves, with the reason.
EXCEPTIONS: dict[str, str] = {
    "pipejax/executors/_executor.py": "a Protocol without code",
    "pipejax/collectives/_no_communication.py": "in tests/overlap/test_measure.py",
}

# Modules that import private modules of another package, with the reason.
IMPORT_PRIVATE = {
    "pipejax/cli/_launch.py": "`pipejax launch` is the command line of pipejax.launch",
}

# Reference twins are written by hand: they may import one another, but not pipejax.
TWINS = [
    "tests/reference.py",
    "tests/epochs.py",
    "tests/collectives/reference.py",
    "tests/executors/by_hand.py",
    "tests/flax/twin.py",
    "tests/overlap/independent.py",
]


def place_of_test(module):
    """Returns where a module's test belongs. Both are paths from the root."""
    path = pathlib.PurePosixPath(module)
    name = f"test_{path.stem.removeprefix('_')}.py"
    return str("tests" / path.parent.relative_to("pipejax") / name)


def modules():
    """Returns all modules but `__init__` and `__main__`, as paths from the root."""
    found = (ROOT / "pipejax").rglob("*.py")
    return {
        path.relative_to(ROOT).as_posix()
        for path in found
        if not path.name.startswith("__")
    }


def test_a_test_is_named_after_its_module():
    assert place_of_test("pipejax/codecs/_cast.py") == "tests/codecs/test_cast.py"
    assert place_of_test("pipejax/flax/nnx.py") == "tests/flax/test_nnx.py"
    assert place_of_test("pipejax/_internal/mesh.py") == "tests/internal/test_mesh.py"


def test_every_module_has_a_test_of_its_name():
    without = {
        module for module in modules() if not (ROOT / place_of_test(module)).exists()
    }
    assert sorted(without - EXCEPTIONS.keys()) == []


def test_every_exception_is_one():
    """A module on the list exists, and has no test."""
    assert sorted(EXCEPTIONS.keys() - modules()) == []
    tested = {name for name in EXCEPTIONS if (ROOT / place_of_test(name)).exists()}
    assert sorted(tested) == []


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


def test_no_package_imports_private_modules_of_another():
    """Code that two packages need is public, or is a module of its own."""
    found = set()
    for module in modules():
        package = module.removeprefix("pipejax/").split("/")[0]
        for name in imported(module, (ROOT / module).read_text()):
            top, *inside = name.split(".")
            private = any(part.startswith("_") for part in inside[1:])
            if top == "pipejax" and private and inside[0] != package:
                found.add(module)
    assert found == IMPORT_PRIVATE.keys()


def test_reference_twins_import_nothing_of_pipejax():
    """Twins import pipejax neither directly nor through a helper of the tests."""
    twins = {name.removesuffix(".py").replace("/", ".") for name in TWINS}
    for path in TWINS:
        names = imported(path, (ROOT / path).read_text())
        assert not {name for name in names if name.split(".")[0] == "pipejax"}, path
        helpers = {name for name in names if name.split(".")[0] == "tests"}
        # A package, a twin, or something inside a twin.
        assert {
            name
            for name in helpers
            if name not in twins
            and name.rpartition(".")[0] not in twins
            and not (ROOT / name.replace(".", "/")).is_dir()
        } == set(), path
