"""Tests the results on codecs, and what the documents say about them."""

from experiments.report import result

from .quoted import quoted_in


def test_all_programs_send_declared_bytes():
    assert all(row["same"] for row in result("wire")["rows"])


@quoted_in("docs/benchmarks/compression.md")
def test_time_saved_by_compressing_between_hosts():
    rows = result("levels")["rows"]
    nowhere, hosts, both, shot, ring = (
        rows[f"int8, {where}"]
        for where in (
            *("nowhere", "between hosts", "at both levels"),
            *("flat two-shot, at both ends", "flat ring, at every hop"),
        )
    )
    assert abs(hosts["error"] / both["error"] - 5 / 6) < 0.01
    assert abs(ring["error"] / hosts["error"] - 1.5) < 0.02
    assert shot["bytes_between_hosts"] == 2 * hosts["bytes_between_hosts"]
    saved, most = (nowhere["seconds"] - x["seconds"] for x in (hosts, both))
    yield f"saves {100 * saved / most:.0f} % of the time"
