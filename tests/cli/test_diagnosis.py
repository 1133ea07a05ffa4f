"""Tests the findings of `pipejax doctor`: hidden share and advice, as text and JSON."""

import json

import pytest

from pipejax import timing
from pipejax.cli._diagnosis import Advice, Diagnosis, Overlap
from pipejax.cli._model import Model
from pipejax.cli._rows import gain
from pipejax.overlap import Measurement

from .helpers import CLUSTER

HERE = {"devices": "4 x cpu (cpu)", "processes": "4, started by Slurm"}


def overlap(compute, communication, step):
    times = Measurement(*((x, x) for x in (compute, communication, step)))
    return Overlap("a model", "host (two processes)", times)


@pytest.mark.parametrize(
    ("times", "hidden"),
    [
        ((2.0, 1.0, 2.0), 1.0),
        ((2.0, 1.0, 2.5), 0.5),
        ((1.0, 2.0, 3.0), 0.0),
        ((2.0, 1.0, 3.5), 0.0),  # the hidden share is never negative
        ((2.0, 1.0, 1.9), 1.0),
        ((2.0, 0.05, 2.0), None),  # communication is too short to measure
    ],
)
def test_hidden_share_follows_from_the_three_times(times, hidden):
    assert overlap(*times).hidden == hidden


def advice():
    compute = timing.Compute.of(0.12)
    ways = timing.plan(CLUSTER, 4_000_000, compute)
    return Advice(Model(4_000_000, 120.0), ways, CLUSTER)


def test_advice_recommends_the_best_way_in_one_bucket():
    shown = advice().shown
    assert shown["synchronous"].config.width == 1
    assert shown["pipelined"].config.width == 2
    assert shown["recommended"].step <= shown["pipelined"].step
    assert all(x.config.codec is None for x in shown.values())
    *rows, about, predictions = str(advice()).split("\n\n")[0].splitlines()
    assert rows == [f"{name:<14}{choice}" for name, choice in shown.items()]
    assert about == gain()
    assert predictions.startswith(f"{CLUSTER.hosts} devices or hosts predict")


def test_advice_names_the_gradients_to_delay():
    delayed = {"embedding": True, "layers": [True, False]}
    text = str(advice()._replace(delayed=delayed))
    assert text.startswith(str(advice()))
    assert text.splitlines()[-1].startswith(f"delayed = {delayed}")


def test_advice_shows_local_steps_where_no_pipeline_hides():
    compute = timing.Compute.of(0.001)
    ways = timing.plan(CLUSTER, 4_000_000, compute)
    rounds = timing.local_steps(ways, compute)
    found = Advice(Model(4_000_000, 1.0), ways, CLUSTER, rounds=rounds)
    assert found.shown["local steps"] == rounds[0]
    text = str(found)
    assert f"local steps   {rounds[0]}" in text
    assert f"    sync_every={rounds[0].config.sync_every}," in text
    assert "make_local_step" not in str(advice())


def test_diagnosis_of_a_cluster_has_words_and_json():
    found = Diagnosis(
        HERE,
        {"an_option": True},
        {"another": "unknown"},
        overlap(2, 1, 2),
        None,
        [],
        None,
    )
    text = str(found)
    assert "accepted: an_option=True" in text
    assert "refused: another: unknown" in text
    record = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert record["overlap"]["hidden"] == 1.0
    assert record["overlap"]["step"] == [2, 2]
    assert record["cluster"] is record["model"] is record["python"] is None


def test_single_device_is_told_of_no_exchange():
    found = Diagnosis(HERE, {}, {}, overlap(2, 0.01, 2), None, [], None)
    text = str(found)
    assert "A single device has nothing to exchange." in text
    assert "None are needed." in text
    assert "Start this command on every host" in text
