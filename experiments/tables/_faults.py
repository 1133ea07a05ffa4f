"""Makes the table that sums up the experiments with faults."""

import statistics
from typing import Any

from experiments.faults import goodput
from experiments.report import result


def summary() -> list[list[str]]:
    """Returns what each experiment counts or measures, its result and its limit."""
    jobs = result("faults")["outcomes"]
    same = sum(job["same_bits"] for job in jobs)
    named = sum(job["named"] for job in jobs)
    damaged = result("faults_checkpoints")["outcomes"]
    wrong = sum(x["outcome"] not in ("exact", "fell back") for x in damaged)
    return [
        ["what is counted or measured", "result", "limit"],
        [
            "jobs with a fault that end with the bits of a job without one",
            f"{same} of {len(jobs)}",
            "all",
        ],
        [
            "jobs in which all other processes name the fault, or that a slow link does"
            " not end",
            f"{named} of {len(jobs)}",
            "all",
        ],
        [
            "damaged checkpoints that are restored wrongly",
            f"{wrong} of {len(damaged)}",
            "0",
        ],
        _checksums(result("checkpoint_cost")["cells"][-1]),
        _strangers(result("faults_strangers")),
        _healthy(result("faults_healthy")),
        *_useful(result("faults_goodput")["cells"]),
        _storm(result("faults_storm")["cells"][0]),
        _in_turn(result("two_steps")["found"]),
    ]


def _checksums(cell: dict[str, Any]) -> list[str]:
    save, restore = (100 * cell[name][1] for name in ("of_save", "of_restore"))
    size = f"{cell['bytes'] / 1e6:.0f} MB"
    return [
        f"checksums of a state of {size}: share of a save, and of a restore, of files"
        " that are still in memory",
        f"{save:.0f} %, {restore:.0f} %",
        "0 %",
    ]


def _strangers(record: dict[str, Any]) -> list[str]:
    costs = [cost for name, cost in record["costs"].items() if name != "none"]
    delay, memory = (max(0.0, *(x[key] for x in costs)) for key in ("delay", "memory"))
    return [
        f"four processes among {record['strangers']} strangers of each of"
        f" {len(costs)} kinds: later start, and more memory of process 0, at most",
        f"{delay:.1f} s, {memory:.1f} MB",
        "0 s, 0 MB",
    ]


def _healthy(record: dict[str, Any]) -> list[str]:
    found = record["found"]
    return [
        "jobs without a fault, on cores that other programs keep busy, which a watchdog"
        " ends",
        f"{found['ended']} of {found['jobs']}",
        "0",
    ]


def _useful(cells: list[dict[str, Any]]) -> list[list[str]]:
    title, latest = "useful share of a job's time", cells[0]
    found = goodput.sums(latest)
    share = 100 * found["useful"] / sum(found.values())
    without = 100 * latest["without_faults"]["goodput"]
    return [
        [f"{title}, with a fault in every 200 steps", f"{share:.0f} %", "100 %"],
        [f"{title}, without faults", f"{without:.0f} %", "100 %"],
    ]


def _storm(cell: dict[str, Any]) -> list[str]:
    (job,) = cell["jobs"]
    rate = 3600 * len(job["faults"]) / job["seconds"]
    share = f"{100 * job['goodput']:.0f} %"
    return [
        f"useful share of a job's time, with {rate:.0f} faults an hour",
        share,
        "100 %",
    ]


def _in_turn(found: list[dict[str, Any]]) -> list[str]:
    ratios = [each["ratio"] for each in found]
    spread = f"({min(ratios):.2f} to {max(ratios):.2f})"
    return [
        "two train steps of one program in turn, by the longer of their summed computes"
        " and summed exchanges",
        f"{statistics.median(ratios):.2f} {spread}",
        "1.00",
    ]
