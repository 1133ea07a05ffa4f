"""Tests that the soak runs from its command line, and counts its cases."""

import json
import subprocess

import pytest

from experiments import soak

# The profile `ci` has three cases, and float32 compiles quickly.
ONE = "tests/codecs/test_properties.py::test_error_is_within_the_bound_for_random_vectors[float32]"


def config(out, **changes):
    return soak.Config(**{"tests": (ONE,), "profile": "ci", "out": out} | changes)


@pytest.mark.full
def test_result_says_how_many_cases(tmp_path):
    out = tmp_path / "soak.json"
    assert soak.main(config(out, least=3)) == 0
    record = json.loads(out.read_text())
    assert record["cases"] == 3
    assert record["tests"].startswith("1 passed")


@pytest.mark.full
@pytest.mark.parametrize("changes", [{"least": 4}, {"tests": ("tests/no_such",)}])
def test_too_few_or_failing_tests_have_no_result(tmp_path, capsys, changes):
    out = tmp_path / "soak.json"
    assert soak.main(config(out, **changes)) == 1
    assert not out.exists()
    assert "Failed, or fewer than" in capsys.readouterr().err


PRINTED = "  - 3 passing examples, 0 failing examples\n==== 1 passed in 1.00s ====\n"


@pytest.mark.parametrize(("code", "least"), [(0, 4), (1, 3)])
def test_what_pytest_says_of_too_few_or_failing_tests_fails(
    tmp_path, capsys, monkeypatch, code, least
):
    def run(command, **settings):
        assert command[1:4] == ["-m", "pytest", ONE]
        return subprocess.CompletedProcess(command, code, stdout=PRINTED)

    monkeypatch.setattr(subprocess, "run", run)
    out = tmp_path / "soak.json"
    assert soak.main(config(out, least=least)) == 1
    assert not out.exists()
    told = capsys.readouterr()
    assert told.out == "3 cases; 1 passed in 1.00s\n"
    assert f"Failed, or fewer than {least} cases." in told.err
