"""Tests the experiment on compile time with a model of few leaves."""

import json

import pytest

from experiments import compile_time


def test_compile_time_of_every_step_is_compared_with_its_twin(tmp_path):
    out = tmp_path / "compile_time.json"
    compile_time.main(compile_time.Config((4,), rounds=1, out=out))
    (row,) = json.loads(out.read_text())["leaves"].values()
    for name, twin in compile_time.TWINS.items():
        assert row[name]["ratio"] == pytest.approx(
            row[name]["total"] / row[twin]["total"]
        )
    for x in row.values():
        assert x["total"] == pytest.approx(x["trace"] + x["compile"])
        assert 0 < x["least"] <= x["total"] <= x["greatest"]
