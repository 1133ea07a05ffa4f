"""Tests that each test is in one part of `make test-all`, and each module needs one."""

import pathlib
import re
import subprocess

ROOT = pathlib.Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text()


def parts():
    """Returns what each part runs, according to the Makefile."""
    (names,) = re.findall(r"^PARTS \?= (.*)$", MAKEFILE, re.MULTILINE)
    found = dict(re.findall(r"^(\w+) := (.*)$", MAKEFILE, re.MULTILINE))
    return {name: found[name].split() for name in names.split()}


def test_every_test_is_in_one_part():
    listed = [place for places in parts().values() for place in places]
    folders = {f"tests/{path.parent.name}" for path in ROOT.glob("tests/*/test_*.py")}
    assert sorted(listed) == sorted([*folders, "tests/*.py", "pipejax"])


def table():
    """Returns the parts and the modules that need them, from CONTRIBUTING.md."""
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


def test_both_environments_are_set_up(tmp_path):
    """GNU make runs a pattern rule with two targets only once for both."""
    for name in ("Makefile", "pyproject.toml"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    targets = (".venv/ready-dev", ".venv-other/ready-dev")
    command = ["make", "-n", "OTHER_PYTHON=python3", *targets]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert re.findall(r"-m venv (\S+)", done.stdout) == [".venv", ".venv-other"]
