"""Tests which exceptions end the program with a single line instead of a traceback."""

import pytest

from pipejax.cli import _plan, main
from pipejax.cli._usage import UsageError, in_one_line


def test_a_message_is_kept_and_its_cause():
    cause = ValueError("`a` must be 1")
    with pytest.raises(UsageError) as raised, in_one_line(OSError, ValueError):
        raise cause
    assert str(raised.value) == "`a` must be 1"
    assert raised.value.__cause__ is cause


def test_other_exceptions_pass():
    with pytest.raises(KeyError), in_one_line(OSError, ValueError):
        raise KeyError("a mistake of ours")
    with in_one_line(ValueError):
        pass


def test_it_ends_the_program_with_2_and_no_traceback(monkeypatch, capsys):
    def run(args):
        raise UsageError("`--a` must be 1")

    monkeypatch.setattr(_plan, "run", run)
    assert main(["plan", "--parameters", "1", "--compute-ms", "1"]) == 2
    assert capsys.readouterr().err == "pipejax: `--a` must be 1\n"
