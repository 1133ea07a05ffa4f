"""`pipejax plan`: what it prints and draws, and what it refuses."""

import json

import pytest

from pipejax import timing
from pipejax.cli import main
from pipejax.timing import Cluster, CodecSpeed, Link

CLUSTER = Cluster(
    4, Link(5e-5, 62.5e6), reduction=4e9, codecs={"int8": CodecSpeed(4e9, 4e9)}
)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(timing.as_json(CLUSTER)))
    return str(path)


def plan(file, *flags, elements="4000000", compute="120"):
    return main(["plan", file, "--elements", elements, "--compute-ms", compute, *flags])


def test_the_best_first(file, capsys):
    assert plan(file, "--top", "3") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("width 2")
    assert "int8" in lines[0]
    assert "120.0 ms   1.00 x compute  hidden behind compute" in lines[0]
    assert "pipelining gains at most 1." in lines[-1]


def test_a_picture(file, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "scaling.png"
    assert plan(file, "--plot", str(path)) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert "width 1" in capsys.readouterr().out


def test_codecs_beside_the_model_cost_compute(file, capsys):
    plan(file, "--top", "1")
    apart = capsys.readouterr().out
    plan(file, "--top", "1", "--one-core")
    assert capsys.readouterr().out != apart


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"elements": "0"}, "pipejax: `--elements` must be above 0, got 0"),
        ({"compute": "-1"}, "pipejax: `--compute-ms` must be above 0, got -1.0"),
        ({"compute": "nan"}, "pipejax: `--compute-ms` must be above 0, got nan"),
    ],
)
def test_bad_numbers(file, capsys, change, says):
    assert plan(file, **change) == 2
    assert capsys.readouterr().err.strip() == says


def test_bad_files(tmp_path, capsys):
    assert plan(str(tmp_path / "gone.json")) == 2
    assert "No such file" in capsys.readouterr().err
    (tmp_path / "bad.json").write_text("{")
    assert plan(str(tmp_path / "bad.json")) == 2
    (tmp_path / "bad.json").write_text('{"hosts": 2}')
    assert plan(str(tmp_path / "bad.json")) == 2
    assert (
        "`record` must be a cluster as `pipejax calibrate`" in capsys.readouterr().err
    )


def test_a_codec_that_has_no_such_name(tmp_path, capsys):
    record = timing.as_json(CLUSTER)
    record["codecs"] = {"int9": record["codecs"]["int8"]}
    (tmp_path / "cluster.json").write_text(json.dumps(record))
    assert plan(str(tmp_path / "cluster.json")) == 2
    assert "`name` must be one of bf16, truncate" in capsys.readouterr().err
