"""Tests which errors count as damage of a checkpoint."""

import jax
import pytest

from pipejax.checkpoint._fault import DamagedError, Fault, agreed, all_or_none, attempt


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
def test_errors_are_sorted_into_damage_and_other_faults(error, expected):
    assert attempt(raising(error)) == expected


def test_unreadable_leaf_is_named():
    """Orbax wraps the error of TensorStore, which gives the leaf."""
    cause = ValueError(
        r'OUT_OF_RANGE: Error reading "params[\'w\']/0.0" in OCDBT database at local'
        ' file "run/6/state/": Requested byte range [0, 15258) is not valid'
    )

    def read():
        raise Exception("Encountered error while reading array index") from cause

    found = attempt(read)
    assert found.damaged
    assert found.text.startswith("params['w'] cannot be read: OUT_OF_RANGE: Error")


@pytest.mark.parametrize(
    ("said", "damaged"),
    [
        ("UNAVAILABLE: no answer", False),
        ("UNKNOWN: Error reading: [OS error 5: EIO Input/output error]", False),
        ("FAILED_PRECONDITION: [OS error 16: EBUSY Device or resource busy]", False),
        ("INTERNAL: no answer", False),
        ("FAILED_PRECONDITION: Error parsing object member", True),
        ("NOT_FOUND: [OS error 2: ENOENT No such file or directory]", True),
        ("DATA_LOSS: checksum", True),
    ],
)
def test_fault_of_the_storage_is_not_taken_for_damage(said, damaged):
    assert attempt(raising(ValueError(said))) == Fault(damaged, f"ValueError: {said}")


def test_errors_other_than_reading_errors_are_raised():
    with pytest.raises(ZeroDivisionError):
        attempt(raising(ZeroDivisionError()))


def test_results_pass_through_without_an_error():
    assert attempt(lambda: 3) == 3
    assert agreed(None) is None
    assert agreed(Fault(True, "x")) == Fault(True, "x")


@pytest.mark.parametrize("error", [ValueError("in use"), OSError(30, "read-only")])
def test_error_of_an_action_is_raised_with_its_kind(error):
    with pytest.raises(type(error), match=r"in use|read-only"):
        all_or_none(raising(error))
    assert all_or_none(lambda: 3) == 3
