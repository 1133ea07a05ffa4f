"""Tests the results on a GPU, and what the documents say about them."""

import pipejax as pj
from experiments.tables import _gpu

from .quoted import least_and_most, quoted_in


def test_documents_claim_bits_of_gpu_result():
    exact = _gpu.found("exact")
    compared = [*exact["steps"].values(), exact["restored"], exact["skipped"]]
    assert all(comparison["same_bits"] for comparison in compared)
    others = {n for n, row in exact["codecs"].items() if not row["same_message"]}
    assert {name.split(",")[0] for name in others} == {"int8", "sign"}


@quoted_in("docs/timing.md")
def test_speeds_beside_assumed_speeds_are_quoted():
    cluster = pj.timing.assumed(2, 1e9, device="h100")
    names = {"bf16": "bf16", "int8": "int8, block 256", "fp8_e4m3": "fp8 e4m3"}
    ratios = []
    for name, title in names.items():
        for way in ("encode", "decode"):
            _, ms, _ = _gpu.found("codecs")[f"{title}, {way}"]["quartiles_ms"]
            speed = 256 * 2**20 / (1e-3 * ms)
            ratios.append(speed / getattr(cluster.codec(name), way))
    yield f"{least_and_most(ratios)} times the assumed speed"
