"""Tests that `json_copy` copies what JSON preserves, and refuses the rest by place."""

import collections
import dataclasses
import datetime
import enum
import math
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from pipejax.checkpoint._json_values import json_copy


class Level(enum.IntEnum):
    LOW = 1


@dataclasses.dataclass
class Position:
    index: int = 0


KEPT = {
    "scalars": [0, -1, 2**100, 1.5, -0.0, 5e-324, True, False, None, "", "a.b/c \n"],
    "not finite": [math.inf, -math.inf],
    "lone surrogate": "\ud800",
    "": {"": [[], {}, [{}]]},
}


def test_copied_extras_keep_every_type():
    copy = json_copy("extras", KEPT)
    assert repr(copy) == repr(KEPT)  # distinguishes 1, 1.0 and True, and 0.0 and -0.0
    assert math.isnan(json_copy("extras", {"x": math.nan})["x"])


def test_copied_state_of_a_numpy_generator_gives_the_same_numbers():
    rng = np.random.default_rng(7)
    other = np.random.default_rng(0)
    other.bit_generator.state = json_copy("extras", rng.bit_generator.state)
    assert other.integers(2**60) == rng.integers(2**60)


def test_copied_extras_share_no_list_with_the_original():
    value = {"list": [1]}
    copy = json_copy("extras", value)
    value["list"].append(2)
    assert copy == {"list": [1]}


@pytest.mark.parametrize(
    "value",
    [
        np.int64(3),
        np.float64(0.5),
        np.float32(0.5),
        np.bool_(True),
        np.str_("x"),
        np.arange(2),
        jnp.int32(3),
        Level.LOW,
        Position(),
        pathlib.Path("x"),
        (1, 2),
        {1, 2},
        b"x",
        datetime.datetime(2026, 1, 1),
        collections.OrderedDict(a=1),
        1j,
        ...,
    ],
    ids=lambda value: type(value).__name__,
)
def test_extras_changed_by_json_are_refused(value):
    kind = type(value).__qualname__
    rule = (
        r"`extras` must be a dict of values that JSON returns unchanged.*"
        rf"got `extras\['a'\]\[1\]`, .* of type .*{kind}\. Convert it first"
    )
    with pytest.raises(ValueError, match=rule):
        json_copy("extras", {"a": [0, value]})


@pytest.mark.parametrize("key", [1, 1.5, True, None, ("a",), np.str_("a")], ids=repr)
def test_extras_with_keys_other_than_strings_are_refused(key):
    with pytest.raises(ValueError, match=r"got a key of `extras\['a'\]`, .* of type"):
        json_copy("extras", {"a": {key: 1}})


@pytest.mark.parametrize("value", [[1], (), 3, "x", None, collections.OrderedDict()])
def test_extras_other_than_a_dict_are_refused(value):
    with pytest.raises(ValueError, match=r"`extras` must be .*got `extras` itself"):
        json_copy("extras", value)


def test_extras_holding_a_cycle_are_refused():
    value = {}
    value["a"] = [value]
    with pytest.raises(ValueError, match=r"`extras` must be .*cannot write"):
        json_copy("extras", value)


def test_integer_too_long_for_json_is_refused():
    with pytest.raises(ValueError, match=r"`extras` must be .*cannot write.*4300"):
        json_copy("extras", {"a": 10**5000})
