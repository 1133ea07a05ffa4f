"""Tests that each test is in one part of `make test-all`, and each module needs one."""

import pathlib
import re
import subprocess

ROOT = pathlib.Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text()


def parts():
    """Returns the names of the parts, according to the Makefile."""
    (names,) = re.findall(r"^PARTS \?= (.*)$", MAKEFILE, re.MULTILINE)
    return names.split()


def places():
    """Returns the folders and files that any part runs, with wildcards expanded."""
    show = "$(foreach part,$(PARTS),$($(part)))"
    command = ["make", "-f", "-", "--eval", f"show:;@echo {show}", "show"]
    done = subprocess.run(
        command, cwd=ROOT, input=MAKEFILE, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_every_test_is_in_one_part():
    tests = {
        path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/**/test_*.py")
    }
    found = places()
    for test in tests:
        assert sum(test == x or test.startswith(f"{x}/") for x in found) == 1, test
    assert "pipejax" in found


def table():
    """Returns the parts and the modules that need them, from CONTRIBUTING.md."""
    rows = re.findall(
        r"^\| `(\w+)` \| (.*) \|$",
        (ROOT / "CONTRIBUTING.md").read_text(),
        re.MULTILINE,
    )
    return {part: set(re.findall(r"`([^`]+)`", found)) for part, found in rows}


def test_every_folder_of_modules_has_a_part():
    assert [*table()] == parts()
    folders = {path.parent for path in (ROOT / "pipejax").glob("**/_*.py")}
    names = {f"{path.relative_to(ROOT / 'pipejax').as_posix()}/" for path in folders}
    parents = {"./", "_core/", "_internal/hlo/", "_internal/shards/"}
    assert set().union(*table().values()) == names - parents | {"experiments/"}


def test_make_sets_up_both_environments(tmp_path):
    """GNU make runs a pattern rule with two targets only once for both."""
    for name in ("Makefile", "pyproject.toml"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    targets = (".venv/ready-dev", ".venv-other/ready-dev")
    command = ["make", "-n", "OTHER_PYTHON=python3", *targets]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert re.findall(r"-m venv (\S+)", done.stdout) == [".venv", ".venv-other"]
