"""Tests that numbers with units are read as they are meant, or refused."""

import math

import pytest

from pipejax.cli._units import bits, check, count
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
        ("9_999_999_999_999", 9_999_999_999_999),
    ],
)
def test_counts_with_suffixes_are_read(text, number):
    assert count("parameters", text) == number


@pytest.mark.parametrize(
    "text",
    [
        *("", "0", "-1", "1.5", "0.0001k", "1e6", "nan", "M", "3 M", "3MB", "1/2"),
        *("10.1t", "9" * 30, "1" + 400 * "0", "0." + 400 * "0" + "1t"),
    ],
)
def test_texts_other_than_counts_are_refused(text):
    with pytest.raises(UsageError, match="`--parameters` must be a whole number above"):
        count("parameters", text)


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("10gbit", 1e10),
        ("500mbit", 5e8),
        ("2.5Gbit/s", 2.5e9),
        ("100Gbitps", 1e11),
        ("1bit", 1.0),
    ],
)
def test_rates_with_units_are_read_in_bits(text, rate):
    assert bits("bandwidth", text) == rate


@pytest.mark.parametrize(
    "text",
    [
        *("", "10", "500e6", "0gbit", "-1gbit", "10GB/s", "10gb", "nanbit", "1 gbit"),
        "100Gbps",  # `bit` must be spelled out
        *("0.9bit", "1000001tbit", "1" + 400 * "0" + "bit", "." + 400 * "0" + "1gbit"),
    ],
)
def test_rates_without_bit_are_refused(text):
    with pytest.raises(UsageError, match="`--bandwidth` must be a number above 0 with"):
        bits("bandwidth", text)


def test_counts_above_the_given_limit_are_refused():
    assert count("elements", "8k", 8000) == 8000
    with pytest.raises(UsageError, match="and at most 8,000; got '9k'"):
        count("elements", "9k", 8000)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (0, "`--rounds` must be at least 1, got 0"),
        (-0.0, "`--rounds` must be at least 1, got -0.0"),
        (5e-324, "`--rounds` must be at least 1, got 5e-324"),
        (math.nan, "`--rounds` must be at least 1, got nan"),
        (math.inf, "`--rounds` must be at most 1,000, got inf"),
        (10**400, f"`--rounds` must be at most 1,000, got 1{39 * '0'}"),
    ],
)
def test_numbers_out_of_range_are_refused(value, says):
    check("rounds", 1.5, 1, 1000)
    with pytest.raises(UsageError) as raised:
        check("rounds", value, 1, 1000)
    assert str(raised.value) == says
