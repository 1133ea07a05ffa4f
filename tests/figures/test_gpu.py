"""Tests the results on a GPU, and what the documents say about them."""

import pipejax as pj
from experiments import codec_speed
from experiments.tables._gpu import STEPS, found, milliseconds_of_the_link
from experiments.tables._speed import judged

from .quoted import least_and_most, quoted_in


@quoted_in("docs/speed.md")
def test_steps():
    most = max(
        judged(found(f"steps:{model}"), name)["ratio"]["median"]
        for model in ("transformer", "transformer scan")
        for name in STEPS
    )
    yield f"costs at most {100 * (most - 1):.0f} %"
    checked = found("steps:resnet18")["by hand, checked"]["ratio"]["median"]
    yield f"differ by {checked:.2f}"


def test_the_documents_claim_the_bits_that_were_found():
    exact = found("exact")
    compared = [*exact["steps"].values(), exact["restored"], exact["skipped"]]
    assert all(comparison["same_bits"] for comparison in compared)
    others = {n for n, row in exact["codecs"].items() if not row["same_message"]}
    assert {name.split(",")[0] for name in others} == {"int8", "sign"}


@quoted_in("docs/speed.md")
def test_codecs():
    speeds = found("codecs")
    coded = {*codec_speed.CODECS} - {"truncate", "bf16"}
    shares = (speeds[f"{name}, decode"]["of_the_copy"] for name in coded)
    yield f"decode at {least_and_most(shares)}"
    yield f"{speeds['copy']['gigabytes_per_second']:,.0f} GB/s"


@quoted_in("docs/overlap.md")
def test_the_link():
    compute, exchange, step, wire = milliseconds_of_the_link()
    yield f"took {exchange - wire:.0f} ms longer than its bytes"
    yield f"took {step / max(compute, exchange):.2f} times the longer"


@quoted_in("docs/timing.md")
def test_speeds_beside_those_that_a_plan_assumes():
    cluster = pj.timing.assumed(2, 1e9, device="h100")
    names = {"bf16": "bf16", "int8": "int8, block 256", "fp8_e4m3": "fp8 e4m3"}
    ratios = [
        256
        * 2**20
        / (1e-3 * found("codecs")[f"{title}, {way}"]["quartiles_ms"][1])
        / getattr(cluster.codec(name), way)
        for name, title in names.items()
        for way in ("encode", "decode")
    ]
    yield f"{least_and_most(ratios)} times the assumed speed"
