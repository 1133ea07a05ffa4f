"""Tests that flags are written as short as `delayed` takes them."""

import jax
import pytest

from pipejax.cli._delayed import merged_flags


@pytest.mark.parametrize(
    ("flags", "short"),
    [
        (True, True),
        ({"a": False, "b": [False, False]}, False),
        ({"a": True, "b": [False, (True, True)]}, {"a": True, "b": [False, True]}),
        ({"a": {}, "b": True}, {"a": {}, "b": True}),
    ],
)
def test_equal_flags_of_a_subtree_become_one(flags, short):
    assert merged_flags(flags) == short


def test_short_flags_stand_for_the_same_tree():
    flags = {"a": [True, True], "b": {"c": False, "d": (True, False)}}
    assert jax.tree.broadcast(merged_flags(flags), flags) == flags
