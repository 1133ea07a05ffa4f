"""Tests that all-reduces are timed in turn, and what a timed program adds."""

import jax
import numpy as np
import pytest

import pipejax as pj
from pipejax import codecs, timing
from pipejax.timing._stopwatch import CompiledAllReduce, check_several, in_turn


def test_exchange_times_are_given_for_every_round():
    case = timing.Case(pj.collectives.two_shot(codecs.int8()), 1000)
    found = timing.exchange_times(pj.data_mesh(4), {"one": case, "other": case}, 3)
    assert {name: len(times) for name, times in found.items()} == {"one": 3, "other": 3}


def test_exchange_over_two_axes_is_measured():
    mesh = pj.data_mesh(4, axis_name=("host", "device"), hosts=2)
    case = timing.Case(pj.collectives.hierarchical(), 100)
    assert len(timing.exchange_times(mesh, {"it": case}, 1)["it"]) == 1
    assert jax.device_count() >= 4


def test_programs_run_once_before_and_then_in_turn():
    called = []
    programs = {name: lambda name=name: called.append(name) for name in "abc"}
    times = in_turn(pj.data_mesh(2), programs, 2)
    assert "".join(called) == "abcabcabc"
    assert {name: len(each) for name, each in times.items()} == {"a": 2, "b": 2, "c": 2}
    assert all(seconds >= 0 for each in times.values() for seconds in each)


def test_each_device_has_its_own_vector():
    """The summands are leaves for PowerSGD: 2^20 elements are a matrix, 5 a vector."""
    case = timing.Case(pj.collectives.psum(), 2**20 + 5)
    program = CompiledAllReduce(pj.data_mesh(2), case)
    shapes = [x.shape for x in jax.tree.leaves(program.summands)]
    assert shapes == [(2 * 1024, 1024), (2 * 5,)]
    for x in map(np.asarray, jax.tree.leaves(program.summands)):
        first, second = np.split(x, 2)
        assert (first != second).all()


def test_single_device_is_refused():
    check_several(pj.data_mesh(2))
    with pytest.raises(ValueError, match="`mesh` must have several devices, got one"):
        check_several(pj.data_mesh(1))
