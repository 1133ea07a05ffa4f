"""Tests that the soak runs from its command line, and counts its cases."""

import json
import subprocess

import pytest

from experiments import soak

# The profile `ci` has three cases, and float32 compiles quickly.
ONE = "tests/codecs/test_properties.py::test_errors_of_vectors_are_bounded[float32]"


def config(out, **changes):
    return soak.Config(**{"tests": (ONE,), "profile": "ci", "out": out} | changes)


@pytest.mark.full
def test_soak_result_counts_its_cases(tmp_path):
    out = tmp_path / "soak.json"
    assert soak.main(config(out, least=3)) == 0
    record = json.loads(out.read_text())
    assert record["cases"] == 3
    assert record["tests"].startswith("1 passed")


@pytest.mark.full
@pytest.mark.parametrize("changes", [{"least": 4}, {"tests": ("tests/no_such",)}])
def test_soak_with_few_cases_or_failures_writes_no_result(tmp_path, capsys, changes):
    out = tmp_path / "soak.json"
    assert soak.main(config(out, **changes)) == 1
    assert not out.exists()
    assert "Failed, or fewer than" in capsys.readouterr().err


PRINTED = "  - 3 passing examples, 0 failing examples\n==== 1 passed in 1.00s ====\n"


@pytest.mark.parametrize(("code", "least"), [(0, 4), (1, 3)])
def test_soak_fails_if_pytest_reports_few_cases_or_failures(
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
