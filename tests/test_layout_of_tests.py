"""
Tests that each module has a test of its name, and that twins stand alone.

`pipejax/<package>/_<module>.py` is tested in `tests/<package>/test_<module>.py`. Files
of other names test several modules together.
"""

import pathlib

from .test_layers import ROOT, imported, modules

# Modules that have nothing to test by themselves, with the reason.
EXCEPTIONS: dict[str, str] = {
    "pipejax/_internal/types.py": "names without code",
    "pipejax/_core/executors/_round_parts.py": "types, in test_rounds.py beside it",
    "pipejax/_core/message/_compress_state.py": "a type without code",
    "pipejax/_core/rounds/_info.py": "types without code",
    "pipejax/_core/step/_step.py": "types without code",
    "pipejax/_core/step/_zero1_update.py": "in tests/core/step/test_zero1.py",
    "pipejax/collectives/_no_communication.py": "in tests/overlap/test_measure.py",
}

# Reference twins are written by hand: they may import one another, but not pipejax.
TWINS = [
    "tests/reference.py",
    "tests/epochs.py",
    "tests/collectives/reference.py",
    "tests/core/executors/by_hand.py",
    "tests/core/rounds/by_hand.py",
    "tests/flax/twin.py",
    "tests/overlap/independent.py",
]


def place_of_test(module):
    """Returns where a module's test belongs. Both are paths from the root."""
    path = pathlib.PurePosixPath(module)
    folders = (name.removeprefix("_") for name in path.parent.parts[1:])
    return "/".join(["tests", *folders, f"test_{path.stem.removeprefix('_')}.py"])


def test_place_of_test_follows_the_name_of_the_module():
    assert place_of_test("pipejax/codecs/_cast.py") == "tests/codecs/test_cast.py"
    assert place_of_test("pipejax/flax/nnx.py") == "tests/flax/test_nnx.py"
    assert place_of_test("pipejax/_internal/mesh.py") == "tests/internal/test_mesh.py"
    assert place_of_test("pipejax/_core/message/_reduce.py") == (
        "tests/core/message/test_reduce.py"
    )


def test_every_module_has_a_test_of_its_name():
    without = {
        module for module in modules() if not (ROOT / place_of_test(module)).exists()
    }
    assert sorted(without - EXCEPTIONS.keys()) == []


def test_every_exception_exists_and_has_no_test():
    """A module on the list exists, and has no test."""
    assert sorted(EXCEPTIONS.keys() - modules()) == []
    tested = {name for name in EXCEPTIONS if (ROOT / place_of_test(name)).exists()}
    assert sorted(tested) == []


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
