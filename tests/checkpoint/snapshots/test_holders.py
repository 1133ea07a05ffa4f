"""Tests which process keeps the copy of which part."""

import pytest

from pipejax.checkpoint._snapshots._holders import holders


@pytest.mark.parametrize(
    ("hosts", "wanted"),
    [
        (["a"], [None]),
        (["a", "b", "c"], [1, 2, 0]),
        (["a", "b", "a", "b"], [1, 0, 3, 2]),
        (["a", "a", "a", "b"], [3, 3, 3, 0]),
    ],
)
def test_copies_lie_on_the_next_host(hosts, wanted):
    assert holders(hosts) == wanted
