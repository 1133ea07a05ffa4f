"""Tests profiles of all-reduces by phase."""

import pytest

import pipejax as pj
from pipejax import codecs, collectives, timing

INT8 = codecs.int8()


def test_profile_measures_the_phases_of_each_case():
    cases = {
        "two-shot": timing.Case(collectives.two_shot(INT8), 2**16),
        "psum": timing.Case(collectives.psum(), 2**16),
    }
    profiles = timing.profile(pj.data_mesh(4), cases, rounds=2)
    assert list(profiles) == list(cases)
    for each in profiles.values():
        assert min(each) >= 0
        assert each.total == pytest.approx(sum(each))
        assert each.launch > 0
    assert profiles["psum"].reduction == profiles["psum"].second == 0


def test_profile_on_one_device_is_refused():
    with pytest.raises(ValueError, match="`mesh` must have several devices, got one"):
        timing.profile(pj.data_mesh(1), {}, rounds=1)
