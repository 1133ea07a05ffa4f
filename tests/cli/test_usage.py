"""Tests which exceptions end the program with a single line instead of a traceback."""

import jax
import pytest

from pipejax.cli import _plan, main
from pipejax.cli._usage import UsageError, enough_memory, in_one_line


def test_usage_error_keeps_message_and_cause():
    cause = ValueError("`a` must be 1")
    with pytest.raises(UsageError) as raised, in_one_line(OSError, ValueError):
        raise cause
    assert str(raised.value) == "`a` must be 1"
    assert raised.value.__cause__ is cause


def test_other_exceptions_pass_unchanged():
    with pytest.raises(KeyError), in_one_line(OSError, ValueError):
        raise KeyError("a mistake of ours")
    with in_one_line(ValueError):
        pass


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("40 TB"),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 40 TB"),
    ],
)
def test_lack_of_memory_is_reported_with_the_option(error):
    says = r"^`--sizes` must be vectors for which there is memory; got .*40 TB\. Choose"
    with pytest.raises(UsageError, match=says), enough_memory("sizes"):
        raise error


def test_other_errors_of_xla_keep_their_traceback():
    error = jax.errors.JaxRuntimeError("INTERNAL: another")
    with pytest.raises(jax.errors.JaxRuntimeError), enough_memory("sizes"):
        raise error


def test_usage_error_ends_the_program_with_2_and_no_traceback(monkeypatch, capsys):
    def run(args):
        raise UsageError("`--a` must be 1")

    monkeypatch.setattr(_plan, "run", run)
    assert main(["plan", "--parameters", "1", "--compute-ms", "1"]) == 2
    assert capsys.readouterr().err == "pipejax: `--a` must be 1\n"
