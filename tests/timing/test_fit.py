"""Tests fits: they find known speeds, and refuse samples that cannot determine them."""

import dataclasses
import math

import numpy as np
import pytest

from pipejax import timing
from pipejax.timing import ExchangeCounts, Link, Sample, Shares
from pipejax.timing._fit import fit_inner

from .known import KNOWN

ALGORITHMS = ("psum", "ring", "two_shot", "halving_doubling", "tree")


def samples(noise=0.0, algorithms=ALGORITHMS, known=KNOWN, rounds=1):
    rng = np.random.default_rng(0)
    found = []
    for algorithm in algorithms:
        for n in (2**10, 2**14, 2**18, 2**22):
            exchange = ExchangeCounts(
                timing.COST_MODELS[algorithm](known.hosts, n, None)
            )
            seconds = timing.duration(known, exchange).total
            times = seconds * np.exp(noise * rng.normal(size=rounds))
            found.append(Sample(f"{algorithm} {n}", exchange, tuple(times)))
    return found


def test_fit_finds_the_known_cluster_exactly():
    fit = timing.fit(4, samples(), KNOWN.reduction, KNOWN.codecs)
    np.testing.assert_allclose(fit.errors, 0, atol=1e-9)
    link, known = fit.cluster.link, KNOWN.link
    assert math.isclose(link.latency, known.latency, rel_tol=1e-6)
    assert math.isclose(link.bandwidth, known.bandwidth, rel_tol=1e-6)
    synchronisation = fit.cluster.synchronisation
    assert math.isclose(synchronisation, KNOWN.synchronisation, rel_tol=1e-6)
    found = dataclasses.astuple(fit.cluster.shares)
    np.testing.assert_allclose(found, dataclasses.astuple(KNOWN.shares), rtol=1e-6)


def test_inner_link_is_found_beside_known_costs():
    inner = Link(3e-5, 5e9)
    known = dataclasses.replace(KNOWN, devices=4, inner=inner)
    exchanges = [
        timing.COST_MODELS[algorithm](4, n, None)
        for algorithm in ALGORITHMS
        for n in (2**14, 2**22)
    ]
    times = [
        timing.duration(known, ExchangeCounts(inside=counts)).total
        for counts in exchanges
    ]
    found = fit_inner(KNOWN, 4, [*zip(exchanges, times, strict=True)])
    assert math.isclose(found.latency, inner.latency, rel_tol=1e-3)
    assert math.isclose(found.bandwidth, inner.bandwidth, rel_tol=1e-3)


def test_inner_link_stays_finite_where_launches_take_longer():
    """Between hosts, collectives wait for each other for longer than all of these."""
    exchanges = [timing.COST_MODELS["ring"](4, n, None) for n in (2**10, 2**20)]
    slow = dataclasses.replace(KNOWN, synchronisation=1.0)
    times = [1e-5, 4e-4]
    found = fit_inner(slow, 4, [*zip(exchanges, times, strict=True)])
    fastest = exchanges[1].wire / times[1]
    assert fastest / 2 < found.bandwidth < 11 * fastest


def test_fit_of_noisy_samples_is_within_ten_percent():
    """5 % of noise on 20 samples of six numbers moves speeds by about 5 %/sqrt(3)."""
    fit = timing.fit(4, samples(noise=0.05), KNOWN.reduction)
    assert abs(fit.cluster.link.bandwidth / KNOWN.link.bandwidth - 1) < 0.1
    assert np.abs(fit.errors).max() < 0.25
    assert np.abs(fit.errors).max() > 0.01


def test_samples_with_large_spread_count_less():
    """Samples of one size are off by half, and the bandwidth is that of the others."""
    true = samples()
    off = [
        sample._replace(times=tuple(x * sample.seconds for x in (1.0, 1.5, 3.0)))
        if sample.name.endswith(" 262144")
        else sample
        for sample in true
    ]
    blind = [sample._replace(times=(sample.seconds,)) for sample in off]
    found, other = (
        timing.fit(4, given, KNOWN.reduction).cluster.link.bandwidth
        for given in (off, blind)
    )
    known = KNOWN.link.bandwidth
    assert abs(found / known - 1) < 0.02
    assert abs(found / known - 1) < abs(other / known - 1) / 2


def test_full_duplex_link_is_found():
    free = dataclasses.replace(KNOWN, shares=Shares())
    shares = timing.fit(4, samples(known=free), KNOWN.reduction).cluster.shares
    assert min(dataclasses.astuple(shares)) > 0.98


def test_two_hosts_have_a_pair_share_but_no_shift():
    two = dataclasses.replace(KNOWN, hosts=2)
    shares = timing.fit(2, samples(known=two), KNOWN.reduction).cluster.shares
    assert shares.shift == 1
    assert math.isclose(shares.pair, 0.6, rel_tol=1e-6)


def test_seconds_of_a_sample_are_its_median():
    sample = Sample("it", ExchangeCounts(), (1.0, 4.0, 2.0))
    assert sample.seconds == 2
    assert math.isclose(sample.spread, math.log(2) * math.sqrt(2 / 3))


def test_text_of_a_fit_shows_the_found_speeds():
    text = str(timing.fit(4, samples(), KNOWN.reduction, KNOWN.codecs))
    assert "latency 200 us, bandwidth 500 Mbit/s (0.60 of it pair, 0.90" in text
    assert "synchronisation 500 us" in text
    assert "int8: encodes 2.0, decodes 3.0 GB/s of float32" in text
    assert "ring 4194304" in text


@pytest.mark.parametrize("algorithms", [(), ("psum",), ("ring",), ("two_shot",)])
def test_samples_without_enough_variety_are_refused(algorithms):
    with pytest.raises(
        ValueError, match="`samples` must have several sizes, and algorithms"
    ):
        timing.fit(4, samples(algorithms=algorithms), KNOWN.reduction)
