"""Tests that the document on compression shows the results."""

import statistics

import pytest

from pipejax import codecs

from .results import assert_shown, result


def rows_of_wire():
    record = result("wire")
    assert all(row["same"] for row in record["rows"])
    ratios = {(x["algorithm"], x["codec"]): x["ratio"] for x in record["rows"]}
    algorithms = list(dict.fromkeys(algorithm for algorithm, _ in ratios))
    yield "| codec | " + " | ".join(algorithms) + " |"
    for codec in ("none", *codecs.NAMES):
        found = [ratios.get((algorithm, codec)) for algorithm in algorithms]
        cells = ["" if ratio is None else f"{ratio:.3f}" for ratio in found]
        yield f"| {codec} | " + " | ".join(cells) + " |"


def rows_of_codecs():
    rows = result("codecs")["codecs"]
    most = rows["none"]["bytes_sent"]
    for name, row in rows.items():
        cells = [f"{row['bytes_sent']:,.0f}", f"{row['bytes_sent'] / most:.3f}"]
        for width in ("width 1", "width 2"):
            values = [100 * x for x in row[width]]
            low, high = min(values), max(values)
            cells.append(f"{statistics.mean(values):.1f} ({low:.1f} - {high:.1f})")
        yield f"| {name} | " + " | ".join(cells) + " |"


def rows_of_levels():
    for name, row in result("levels")["rows"].items():
        between, inside = row["bytes_between_hosts"], row["bytes_inside"]
        yield (
            f"| {name} | {row['error']:.4f} | {between / 1e3:.0f} | {inside / 1e3:.0f}"
            f" | {1e6 * row['seconds']:.0f} |"
        )


def words_on_levels():
    """Yields the time that compressing between hosts saves, and its error."""
    rows = result("levels")["rows"]
    nowhere, hosts, both, shot, ring = (
        rows[f"int8, {where}"]
        for where in (
            "nowhere",
            "between hosts",
            "at both levels",
            "flat two-shot, at both ends",
            "flat ring, at every hop",
        )
    )
    saved = [nowhere["seconds"] - x["seconds"] for x in (hosts, both)]
    yield f"saves {saved[0] / saved[1]:.0%} of the time".replace("%", " %")
    assert abs(hosts["error"] / both["error"] - 5 / 6) < 0.01
    assert abs(ring["error"] / hosts["error"] - 1.5) < 0.02
    assert shot["bytes_between_hosts"] == 2 * hosts["bytes_between_hosts"]


def rows_of_codec_speed():
    pages = result("codec_speed")["pages"]
    names = [n.removesuffix(", both") for n in pages["huge pages"] if "both" in n]
    for name in names:
        cells = [
            f"{rows[f'{name}, {way}']['speed of the copy']:.2f}"
            for rows in pages.values()
            for way in ("encode", "decode", "both")
        ]
        yield f"| {name} | " + " | ".join(cells) + " |"


@pytest.mark.parametrize(
    ("path", "rows"),
    [
        ("docs/compression.md", rows_of_wire),
        ("docs/compression.md", rows_of_codecs),
        ("docs/compression.md", rows_of_levels),
        ("docs/compression.md", words_on_levels),
        ("docs/paper.md", words_on_levels),
        ("docs/compression.md", rows_of_codec_speed),
    ],
)
def test_figures_equal_the_result_files(path, rows):
    assert_shown(path, rows())
