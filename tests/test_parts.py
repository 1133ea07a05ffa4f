"""The parts of `make test-all`: every test is in one, every module needs one."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text()


def parts():
    """What each part runs, as the Makefile has it."""
    (names,) = re.findall(r"^PARTS \?= (.*)$", MAKEFILE, re.MULTILINE)
    found = dict(re.findall(r"^(\w+) := (.*)$", MAKEFILE, re.MULTILINE))
    return {name: found[name].split() for name in names.split()}


def test_every_test_is_in_one_part():
    listed = [place for places in parts().values() for place in places]
    folders = {f"tests/{path.parent.name}" for path in ROOT.glob("tests/*/test_*.py")}
    assert sorted(listed) == sorted([*folders, "tests/*.py", "pipejax"])


def table():
    """Parts and what needs them, as CONTRIBUTING.md has it."""
    rows = re.findall(
        r"^\| `(\w+)` \| (.*) \|$",
        (ROOT / "CONTRIBUTING.md").read_text(),
        re.MULTILINE,
    )
    return {part: set(re.findall(r"`([^`]+)`", places)) for part, places in rows}


def test_every_module_needs_a_part():
    assert table().keys() == parts().keys()
    modules = {
        path.name if path.is_file() else f"{path.name}/"
        for path in (ROOT / "pipejax").iterdir()
        if not path.name.startswith("_") and path.name != "py.typed"
    }
    assert set().union(*table().values()) == modules | {"experiments/"}
