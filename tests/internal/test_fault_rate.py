"""Tests how many faults a job expects."""

import pytest

from pipejax._internal.fault_rate import estimated, faults_per_hour


def test_faults_per_hour_come_from_a_variable():
    assert faults_per_hour({}) == 1 / 24
    assert faults_per_hour({"PIPEJAX_FAULTS_PER_HOUR": "2.5"}) == 2.5


@pytest.mark.parametrize("text", ["no", "0", "-1", "nan", "inf"])
def test_variable_must_be_a_number_above_0(text):
    with pytest.raises(ValueError, match=f"must be a number above 0, got '{text}'"):
        faults_per_hour({"PIPEJAX_FAULTS_PER_HOUR": text})


def test_estimate_follows_the_faults_of_a_job():
    assert estimated(0, 0.0) == 1 / 24
    assert estimated(10, 4.0) == pytest.approx(2.0, rel=0.01)
    assert estimated(0, 23.0) < 1 / 500
