"""Tests that numbers with units are read as they are meant, or refused."""

import pytest

from pipejax.cli._units import bits, count
from pipejax.cli._usage import UsageError


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1", 1),
        ("4_000_000", 4_000_000),
        ("70k", 70_000),
        ("300M", 300_000_000),
        ("1.3B", 1_300_000_000),
        ("2.7g", 2_700_000_000),
        ("1.001b", 1_001_000_000),
        ("1t", 10**12),
    ],
)
def test_counts(text, number):
    assert count("parameters", text) == number


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "1.5", "0.0001k", "1e6", "nan", "M", "3 M", "3MB", "1/2"]
)
def test_what_is_no_count(text):
    with pytest.raises(UsageError, match="`--parameters` must be a whole number above"):
        count("parameters", text)


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("10gbit", 1e10),
        ("500mbit", 5e8),
        ("2.5Gbit/s", 2.5e9),
        ("100Gbps", None),  # `bit` must be spelled out
        ("100Gbitps", 1e11),
        ("1bit", 1.0),
    ],
)
def test_rates(text, rate):
    if rate is not None:
        assert bits("bandwidth", text) == rate


@pytest.mark.parametrize(
    "text", ["", "10", "500e6", "0gbit", "-1gbit", "10GB/s", "10gb", "nanbit", "1 gbit"]
)
def test_what_may_be_bytes_is_refused(text):
    with pytest.raises(UsageError, match="`--bandwidth` must be a number above 0 with"):
        bits("bandwidth", text)
