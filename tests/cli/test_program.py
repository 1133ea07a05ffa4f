"""Tests how a function named on the command line is loaded, and how errors name it."""

import sys

import pytest

from pipejax.cli._program import load, types
from pipejax.cli._usage import UsageError


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Provides a working directory with modules that are not loaded yet."""
    (tmp_path / "program_here.py").write_text("def f(): return 'here'\nnumber = 3\n")
    inside = tmp_path / "program_package"
    inside.mkdir()
    (inside / "program_inside.py").write_text("def f(): return 'inside'\n")
    (inside / "program_broken.py").write_text("import program_package.gone\n")
    (tmp_path / "program_open.py").write_text("def f(:\n")
    (tmp_path / "program_bytes.py").write_bytes(b"\x00\xff")
    (tmp_path / "program_folder.py").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("program_"):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("program_here:f", "here"),
        ("program_here.py:f", "here"),
        ("program_package.program_inside:f", "inside"),
        ("program_package/program_inside.py:f", "inside"),
    ],
)
def test_module_or_file_is_loaded_from_the_current_folder(name, says):
    assert load(name)() == says


@pytest.mark.parametrize("name", ["program_here", "random", "model.v2"])
def test_file_is_loaded_where_another_module_has_its_name(name, folder):
    """The folder of the file is in the path already, behind one with the same name."""
    inside = folder / "program_package"
    (folder / f"{name}.py").write_text("def f(): return 'another'\n")
    (inside / f"{name}.py").write_text("def f(): return 'inside'\n")
    sys.path[:0] = [str(folder), str(inside)]
    imported = sys.modules.get(name)
    assert load(f"program_package/{name}.py:f")() == "inside"
    assert sys.modules.get(name) is imported


def test_module_is_loaded_from_the_current_folder_first(folder):
    (folder / "program_package" / "program_here.py").write_text("def f(): pass\n")
    sys.path.insert(0, str(folder / "program_package"))
    sys.path.append(str(folder))
    assert load("program_here:f")() == "here"


def test_file_may_have_dataclasses_and_import_its_neighbours(folder):
    inside = folder / "program_package"
    (inside / "program_types.py").write_text(
        "from __future__ import annotations\nimport dataclasses, program_inside\n"
        "@dataclasses.dataclass\nclass A:\n  x: int\n"
        "def f(): return A, program_inside.f()\n"
    )
    assert load("program_package/program_types.py:f")()[1] == "inside"


def test_folder_is_put_first_in_the_path_once(folder):
    for _ in range(2):
        load("program_package/program_inside.py:f")
        load("program_here:f")
    assert sys.path[:2] == [str(folder), str(folder / "program_package")]
    assert sys.path.count(str(folder)) == 1


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("program_here", "the program must be MODULE:FUNCTION, got 'program_here'"),
        (":f", "the program must be MODULE:FUNCTION, got ':f'"),
        ("program_here:", "the program must be MODULE:FUNCTION"),
        ("program_gone.py:f", "there is no file 'program_gone.py'"),
        ("program_gone:f", "there is no module 'program_gone', neither in this folder"),
        ("program_package.gone:f", "there is no module 'program_package.gone'"),
        ("program_here:g", "'program_here' has no function 'g'"),
        ("program_open.py:f", r"'program_open.py' must be Python: .*, line 1\)"),
        ("program_open:f", "'program_open' must be Python: invalid syntax"),
        ("program_bytes.py:f", "'program_bytes.py' must be Python: "),
        ("program_folder.py:f", "there is no file 'program_folder.py'"),
        ("..:f", r"the module must be named from its root, got '\.\.'"),
        (".program_here:f", "the module must be named from its root, got"),
        ("program_here:number", "'program_here' has no function 'number'"),
    ],
)
def test_bad_program_is_named_in_the_error(name, says):
    with pytest.raises(UsageError, match=f"^{says}"):
        load(name)


@pytest.mark.parametrize(
    ("name", "gone"),
    [
        ("program_package.program_broken:f", r"program_package\.gone"),
        ("program_missing.v2.py:f", "program_missing"),
    ],
)
def test_missing_import_of_a_program_keeps_its_traceback(name, gone, folder):
    (folder / "program_missing.v2.py").write_text("import program_missing\n")
    with pytest.raises(ModuleNotFoundError, match=gone):
        load(name)


def test_types_of_returned_values_are_printed():
    assert types(3) == "int"
    assert types((3, "a", None)) == "(int, str, NoneType)"
    assert types(()) == "()"
