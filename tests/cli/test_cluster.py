"""Tests a command's cluster: read from a file, given by options, or assumed."""

import argparse
import json
import math

import pytest

from pipejax import timing
from pipejax.cli import _cluster
from pipejax.cli._command import add_options
from pipejax.cli._usage import UsageError

from ..test_documents import ROOT
from .helpers import CLUSTER, plan, written

DOCUMENT = (ROOT / "docs" / "reference" / "files.md").read_text()


def fitted(rounds=3):
    """Fits times that follow the formula, so that three rounds can be trusted."""
    samples = [
        timing.Sample(f"{algorithm} {n}", exchange, rounds * (seconds,), n)
        for algorithm in ("psum", "ring", "two_shot", "halving_doubling", "tree")
        for n in (2**10, 2**14, 2**18, 2**22)
        for exchange in [
            timing.ExchangeCounts(timing.COST_MODELS[algorithm](4, n, None))
        ]
        for seconds in [timing.duration(KNOWN, exchange).total]
    ]
    return timing.fit(4, samples, KNOWN.reduction)


KNOWN = timing.Cluster(
    4, timing.Link(2e-4, 62.5e6), reduction=4e9, synchronisation=5e-4
)


@pytest.mark.parametrize(
    ("rounds", "elements", "notes"),
    [
        (3, 2**22, []),
        (3, 2**23, ["Extrapolated: the gradient has 2.0 times the elements"]),
        (1, 2**22, ["This fit cannot be trusted."]),
        (1, 2**23, ["This fit cannot be trusted.", "Extrapolated: "]),
    ],
)
def test_written_calibration_is_read_with_its_doubts(tmp_path, rounds, elements, notes):
    fit, path = fitted(rounds), tmp_path / "cluster.json"
    path.write_text(json.dumps(_cluster.calibration(fit)))
    known = _cluster.read(str(path), elements)
    assert known.cluster == fit.cluster
    for note, begins in zip(known.notes, notes, strict=True):
        assert note.startswith(begins)


def parsed(*arguments):
    parser = argparse.ArgumentParser()
    parser.add_argument("cluster", nargs="?")
    add_options(parser, _cluster.OPTIONS)
    return parser.parse_args(arguments)


def test_options_are_read_in_the_units_of_their_names():
    """A bit is an eighth of a byte, and a microsecond is 1e-6 of a second."""
    flags = ("--hosts", "4", "--bandwidth", "10gbit", "--latency-us", "20")
    cluster, notes = _cluster.known(parsed(*flags), 100)
    assert (cluster.hosts, cluster.devices) == (4, 1)
    assert cluster.link.bandwidth == 1.25e9
    assert cluster.link.latency == pytest.approx(2e-5, rel=1e-12)
    assert notes[0].startswith("This cluster is not calibrated. Assumed are 20 us a")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ((), "`--hosts` and `--bandwidth` must be given"),
        (("--hosts", "4"), "`--bandwidth` must be given"),
        (("a.json", "--latency-us", "0"), "`--latency-us` must be left out beside a f"),
        (
            ("a.json", "--hosts", "4", "--device", "cpu"),
            "`--hosts`, `--device` must be left out beside a file",
        ),
    ],
)
def test_options_beside_a_file_are_refused(flags, says):
    with pytest.raises(UsageError, match=f"^{says}"):
        _cluster.known(parsed(*flags), 100)


FIT = {"trusted": True, "verdict": "This fit can be trusted.", "largest": 2**21}


def test_doubts_about_a_calibration_are_printed(tmp_path, capsys):
    plan(written(tmp_path, fit=FIT), parameters="2M")
    assert capsys.readouterr().out.startswith("  1  width 2, ")
    plan(written(tmp_path, fit=FIT), parameters="8388608")
    assert capsys.readouterr().out.startswith(
        "Extrapolated: the gradient has 4.0 times the elements of the largest vector"
        " measured, 2,097,152.\n\n  1  width 2, "
    )
    verdict = "This fit cannot be trusted. It is not."
    fit = {"trusted": False, "verdict": verdict, "largest": None}
    plan(written(tmp_path, fit=fit))
    assert capsys.readouterr().out.startswith(f"{verdict}\n\n  1  width 2, ")


def changed(**fields):
    """Returns a calibration with other fields of its cluster."""
    return {"cluster": {**timing.as_json(CLUSTER), **fields}}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "No such file"),
        ("{", "bad.json must be JSON: Expecting property name"),
        ("[]", "bad.json: a calibration must be an object with `cluster`"),
        ('{"hosts": 2}', "bad.json: a calibration must be an object with `cluster`"),
        ('{"cluster": {"hosts": 2}}', "bad.json: `cluster` must have link, got ['ho"),
        (
            '{"cluster": {"hosts": 2, "link": {"latency": 0, "bandwidth": -1}}}',
            "bad.json: In `cluster.link`: `bandwidth` must be above 0 bytes per second",
        ),
        ("", "bad.json must be JSON: Expecting value"),
        (b"\xff\x00", "bad.json' must be JSON: 'utf-8' codec can't decode byte 0xff"),
        ("[" * 100_000, "bad.json must be JSON: maximum recursion depth exceeded"),
        (" " * 10_000_001, "bad.json must be JSON: it has more than 10,000,000 char"),
        ("[" + "9" * 5000 + "]", "bad.json must be JSON: Exceeds the limit"),
        (changed(hosts=None), "`hosts` must be a whole number of at least 1 and at mo"),
        (changed(devices=None), "`devices` must be a whole number of at least 1 and"),
        (changed(devices=10**400), "at most 1,000,000,000, got 1000000000"),
        (changed(reduction=10**400), "`reduction` must be above 0 bytes per second"),
        (changed(reduction=math.nan), "`reduction` must be above 0 bytes per second"),
        (changed(synchronisation=1e308), "takes a finite time; got "),
        (changed(synchronisation=10**400), "must be at least 0 seconds and finite"),
        (changed(shares={"pair": 1e-320}), "takes a finite time; got "),
        (changed(shares={"pair": -0.0}), "`pair` must be a share of the bandwidth"),
        ({"fit": {**FIT, "largest": -5}}, "cluster.json: `fit` must have `trusted`"),
        ({"fit": []}, "cluster.json: `fit` must have `trusted`, true or false"),
        ({"fit": {**FIT, "trusted": 1}}, "cluster.json: `fit` must have `trusted`"),
        ({"fit": {**FIT, "largest": "2"}}, "cluster.json: `fit` must have `trusted`"),
    ],
)
def test_bad_calibration_files_are_refused_in_one_line(tmp_path, capsys, text, says):
    path = str(tmp_path / "bad.json")
    if isinstance(text, dict):
        path = written(tmp_path, **text)
    elif text is not None:
        content = text if isinstance(text, bytes) else text.encode()
        (tmp_path / "bad.json").write_bytes(content)
    assert plan(path) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


@pytest.mark.parametrize("path", [".", "a\0b", 5000 * "x"])
def test_path_without_a_file_is_refused_in_one_line(path, capsys):
    assert plan(path) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "Give a file that `pipejax calibrate --out` has written" in line


def test_every_field_of_a_calibration_is_documented():
    samples = [
        timing.Sample(f"{algorithm} {n}", exchange, (seconds,), n)
        for algorithm in ("psum", "ring", "two_shot", "halving_doubling", "tree")
        for n in (2**12, 2**20)
        for exchange in [
            timing.ExchangeCounts(timing.COST_MODELS[algorithm](4, n, None))
        ]
        for seconds in [timing.duration(CLUSTER, exchange).total]
    ]
    record = json.loads(json.dumps(_cluster.calibration(timing.fit(4, samples, 4e9))))
    assert record.keys() == {"cluster", "fit"}
    for part, fields in record.items():
        assert all(f"`{part}.{name}`" in DOCUMENT for name in fields)
    assert all(f"`{name}`" in DOCUMENT for name in record["fit"]["samples"][0])
