"""Tests that a group's failures are raised in the test, without waiting."""

import contextlib
import re
import time

import pytest

from .group import Group, GroupError


@pytest.mark.full
@pytest.mark.parametrize(
    ("task", "message"),
    [
        (
            "fails",
            r"process 1 failed:\n(.*\n)*.*in fails\n(.*\n)*ValueError: none",
        ),
        ("ends", r"process 1 failed:\n(.*\n)*its last words"),
        ("sleeps", r"no answer from \[1\]"),
    ],
)
def test_failure_of_one_process_is_reported_at_once(task, message):
    with contextlib.closing(Group(2)) as group:
        assert group.ask("rank") == [0, 1]
        start = time.monotonic()
        with pytest.raises(GroupError) as caught:
            group.ask(task, patience=5.0)
        assert time.monotonic() - start < 10
        assert re.match(message, str(caught.value))
        assert not group.alive
