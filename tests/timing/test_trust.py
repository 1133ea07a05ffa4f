"""Tests which fits are trusted, and the reasons against others."""

import json
import pathlib
import re

import numpy as np
import pytest

from pipejax import timing
from pipejax.timing import COST_MODELS, Cluster, ExchangeCounts, Link, Sample

RESULTS = pathlib.Path(__file__).parents[2] / "experiments" / "results"
KNOWN = Cluster(4, Link(2e-4, 62.5e6), reduction=4e9, synchronisation=5e-4)
ALGORITHMS = ("psum", "ring", "two_shot", "halving_doubling", "tree")
SIZES = (2**10, 2**14, 2**18, 2**22)


def judged(noise=0.0, rounds=3, known=KNOWN, sizes=SIZES, change=None):
    """Judges a fit to times by the formula, with noise and changed by `change`."""
    rng, samples = np.random.default_rng(0), []
    for algorithm in ALGORITHMS:
        for n in sizes:
            exchange = ExchangeCounts(COST_MODELS[algorithm](known.hosts, n, None))
            times = timing.duration(known, exchange).total * np.ones(rounds)
            times = times * np.exp(noise * rng.normal(size=rounds))
            if change:
                times = times * change(algorithm, n)
            samples.append(Sample(f"{algorithm} {n}", exchange, tuple(times), n))
    return timing.trust(timing.fit(known.hosts, samples, known.reduction))


def test_fit_of_exact_times_is_trusted():
    trust = judged()
    assert trust.trusted
    assert trust.reasons == ()
    assert trust.worst_error < 1e-6
    assert (trust.rounds, trust.spread, trust.largest) == (3, 0.0, 2**22)
    # On 4 devices, the tree takes little more than two levels of 16 MB, twice, at 62.5
    # MB/s.
    assert trust.short == pytest.approx(0.1 * 4 * 2**24 / 62.5e6, rel=0.02)
    assert 0.95 < trust.wire < 1
    said = str(trust)
    assert said.startswith("This fit can be trusted. Its error is 0% in the median")
    assert "times vary by 0% over 3 rounds" in said
    assert said.endswith("Vectors of more than 4,194,304 elements are extrapolated.")


def committed():
    """Yields the fits whose predictions were compared with measurements."""
    for cell in json.loads((RESULTS / "prediction.json").read_text())["cells"]:
        samples = []
        for name, times in cell["samples"].items():
            algorithm, n = name.split()
            counts = COST_MODELS[algorithm](cell["hosts"], int(n), None)
            samples.append(Sample(name, ExchangeCounts(counts), tuple(times), int(n)))
        yield timing.fit(cell["hosts"], samples, cell["cluster"]["reduction"])


def test_committed_fits_are_trusted():
    """The limits come from these fits: errors of 9 % and 30 %, a spread of 12 %."""
    found = [timing.trust(fit) for fit in committed()]
    assert len(found) == 9
    assert all(trust.trusted for trust in found)
    assert 0.085 < max(trust.median_error for trust in found) < 0.095
    assert 0.295 < max(trust.worst_error for trust in found) < 0.305
    assert 0.11 < max(trust.spread for trust in found) < 0.12
    # Short exchanges have much larger errors, and do not count.
    assert max(trust.short_error for trust in found) > 1


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ({"rounds": 2}, "Each exchange was measured 2 times, which is too few to know"),
        ({"noise": 0.5}, "Times vary by 4.% from round to round. Measure again"),
        (
            # psum and tree send bytes as a stream, so a byte should take as long in
            # both.
            {"change": lambda algorithm, n: 3.0 if algorithm == "psum" else 1.0},
            "The formula does not describe this network",
        ),
        (
            {"sizes": (2**4, 2**6, 2**8, 2**10)},
            "The largest exchange spends .*% of its time on bytes, so that the band",
        ),
    ],
)
def test_doubtful_fit_is_reported_with_its_reasons(made, says):
    trust = judged(**made)
    assert not trust.trusted
    assert str(trust).startswith("This fit cannot be trusted. ")
    assert any(re.match(says, reason) for reason in trust.reasons)
    assert all(reason in str(trust) for reason in trust.reasons)


def test_short_exchanges_are_reported_and_not_judged():
    trust = judged(change=lambda algorithm, n: 3.0 if n == 2**10 else 1.0)
    assert trust.trusted
    assert trust.short_error > 0.3
    assert f"{trust.short_error:.0%} at worst for shorter ones" in str(trust)


def test_trust_is_written_as_json():
    trust = judged(rounds=2)
    record = json.loads(json.dumps(trust.to_dict(), allow_nan=False))
    assert record["trusted"] is False
    assert record["verdict"] == str(trust)
    assert record["reasons"] == list(trust.reasons)
    assert record["largest"] == 2**22
    assert record["rounds"] == 2
