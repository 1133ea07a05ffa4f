"""Tests which errors count as damage of a checkpoint."""

import jax
import pytest

from pipejax.checkpoint._fault import DamagedError, Fault, agreed, attempt


def raising(error):
    def read():
        raise error

    return read


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (DamagedError("`meta` is missing"), Fault(True, "`meta` is missing")),
        (FileNotFoundError("no f"), Fault(True, "FileNotFoundError: no f")),
        (ValueError("DATA_LOSS\nat 3"), Fault(True, "ValueError: DATA_LOSS")),
        (KeyError("state"), Fault(True, "KeyError: 'state'")),
        (OSError(5, "I/O error"), Fault(False, "OSError: [Errno 5] I/O error")),
        (MemoryError(), Fault(False, "MemoryError: MemoryError()")),
        (
            jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 9 GB"),
            Fault(False, "JaxRuntimeError: RESOURCE_EXHAUSTED: 9 GB"),
        ),
    ],
)
def test_an_error_is_damage_or_not(error, expected):
    assert attempt(raising(error)) == expected


def test_what_is_no_error_of_reading_is_raised():
    with pytest.raises(ZeroDivisionError):
        attempt(raising(ZeroDivisionError()))


def test_without_an_error():
    assert attempt(lambda: 3) == 3
    assert agreed(None) is None
    assert agreed(Fault(True, "x")) == Fault(True, "x")
