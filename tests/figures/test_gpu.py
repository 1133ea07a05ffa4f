"""Tests that the documents show the results on a GPU."""

import statistics

import pytest

import pipejax as pj
from experiments import codec_speed

from .results import assert_shown, judged, result, with_quartiles

STEPS = ("width 1", "width 2, plain", "width 2, predicted")
SHARDED = "width 2, sharded optimizer"


def found(part):
    """Returns the figures of a part, as measured on an H100."""
    cells = result("gpu_1_x_nvidia_h100_80gb_hbm3")["cells"]
    (figures,) = (cell["found"] for cell in cells if cell["part"] == part)
    return figures


def steps():
    """Returns the variants of a step of each model."""
    models = ("mlp", "cnn", "resnet18", "transformer", "transformer scan")
    return {model: found(f"steps:{model}") for model in models}


def rows_of_steps():
    for model, variants in steps().items():
        rows = [judged(variants, name) for name in (*STEPS, SHARDED)]
        cells = map(with_quartiles, (variants["by hand, checked"], *rows))
        ms = variants["by hand"]["ms_per_step"]
        yield f"| {model} | {ms:.1f} | " + " | ".join(cells) + " |"


def words_on_steps():
    long = ("transformer", "transformer scan")
    most = max(
        judged(steps()[m], name)["ratio"]["median"] for m in long for name in STEPS
    )
    yield f"costs at most {100 * (most - 1):.0f} %"
    checked = found("steps:resnet18")["by hand, checked"]["ratio"]["median"]
    yield f"differ by {checked:.2f}"


def test_documents_claim_the_bits_of_the_result_file():
    exact = found("exact")
    compared = [*exact["steps"].values(), exact["restored"], exact["skipped"]]
    assert all(comparison["same_bits"] for comparison in compared)
    others = {n for n, row in exact["codecs"].items() if not row["same_message"]}
    assert {name.split(",")[0] for name in others} == {"int8", "sign"}


def rows_of_codecs():
    speeds = found("codecs")
    for name in codec_speed.CODECS:
        ways = (speeds[f"{name}, {way}"]["of_the_copy"] for way in ("encode", "decode"))
        yield f"| {name} | " + " | ".join(f"{share:.2f}" for share in ways) + " |"


def words_on_codecs():
    coded = [name for name in codec_speed.CODECS if name not in ("truncate", "bf16")]
    shares = [found("codecs")[f"{name}, decode"]["of_the_copy"] for name in coded]
    yield f"decode at {min(shares):.2f} to {max(shares):.2f}"
    yield f"{found('codecs')['copy']['gigabytes_per_second']:,.0f} GB/s"


def rows_of_memory():
    for step in (*STEPS, SHARDED):
        cells = (
            found(f"memory:{model}:{step}") for model in ("transformer", "resnet18")
        )
        pairs = (
            f"{1e-6 * cell['allocator']['peak_bytes_in_use']:,.0f} |"
            f" {1e-6 * cell['program']['live']:,.0f}"
            for cell in cells
        )
        yield f"| {step} | " + " | ".join(pairs) + " |"


def link():
    """Returns compute, exchange, step and the time of the bytes, in milliseconds."""
    figures = found("hosts:1gbit:psum")
    names = ("compute", "communication", "step")
    times = [1e3 * statistics.median(figures[name]) for name in names]
    return *times, 1e3 * figures["wire_bytes"] / (1e9 / 8)


def rows_of_the_link():
    compute, exchange, step, wire = link()
    limit = max(compute, exchange)
    times = " | ".join(f"{ms:.0f}" for ms in (compute, exchange, wire, step))
    yield f"| {times} | {step / limit:.2f} | {(compute + exchange) / limit:.2f} |"


def words_on_the_link():
    compute, exchange, step, wire = link()
    yield f"took {exchange - wire:.0f} ms longer than its bytes"
    yield f"took {step / max(compute, exchange):.2f} times the longer"


def words_on_assumed_speeds():
    """Yields the least and the greatest speed beside that which a plan assumes."""
    cluster = pj.timing.assumed(2, 1e9, device="h100")
    names = {"bf16": "bf16", "int8": "int8, block 256", "fp8_e4m3": "fp8 e4m3"}
    ratios = []
    for name, title in names.items():
        for way in ("encode", "decode"):
            seconds = 1e-3 * found("codecs")[f"{title}, {way}"]["quartiles_ms"][1]
            speed = 256 * 2**20 / seconds
            ratios.append(speed / getattr(cluster.codec(name), way))
    yield f"{min(ratios):.2f} to {max(ratios):.2f} times the assumed speed"


@pytest.mark.parametrize(
    ("path", "rows"),
    [
        ("docs/speed.md", rows_of_steps),
        ("docs/speed.md", words_on_steps),
        ("docs/speed.md", rows_of_codecs),
        ("docs/speed.md", words_on_codecs),
        ("docs/speed.md", rows_of_the_link),
        ("docs/speed.md", rows_of_memory),
        ("docs/overlap.md", words_on_the_link),
        ("docs/timing.md", words_on_assumed_speeds),
    ],
)
def test_figures_equal_the_result_file(path, rows):
    assert_shown(path, rows())
