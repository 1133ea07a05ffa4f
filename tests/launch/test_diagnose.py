"""Tests which process is at fault, by every rule."""

import dataclasses

import pytest

from pipejax.launch._diagnose import (
    CLOSED,
    DELAYS,
    GRACE,
    HEARD,
    LEAST,
    STEPS,
    ProcessReport,
    Seen,
    diagnose,
)

LIMIT = 60.0


def seen(rank, age=0.5, **changes):
    """Returns a process in its third step that waits for others."""
    report = ProcessReport(rank, f"host{rank}", count=9, step=3, since=1.0)
    return Seen(dataclasses.replace(report, **changes), age)


def late(each, seconds):
    """Returns a process one of whose last reports came too late."""
    return each._replace(late=seconds)


def closed(each, seconds):
    """Returns a process whose connection has been closed for some seconds."""
    return each._replace(closed=seconds)


def stuck(rank, **changes):
    return seen(rank, **({"since": LIMIT + 1} | changes))


@pytest.mark.parametrize(
    "fine",
    [
        [seen(0), seen(1)],
        [stuck(0), seen(1)],
        [stuck(0), stuck(1, busy="compiling")],
        [stuck(0), stuck(1, busy="an evaluation", paused=True)],
        # While a process evaluates, the others may be anywhere.
        [
            seen(0, busy="an evaluation", paused=True),
            stuck(1, outside=LIMIT + 1),
        ],
        # Process 1 has just come back from its wait for a compilation.
        [seen(0, busy="compiling"), stuck(1, outside=1.0)],
        [seen(0), seen(1, age=LIMIT - 1)],
        # A process whose connection has just closed may still say that it lives, and
        # one that has finished need not.
        [seen(0), closed(seen(1), CLOSED)],
        [seen(0), closed(seen(1, finished=True), CLOSED + 1)],
        # Without regular steps, or beside other work, the whole limit counts.
        [seen(0), seen(1, age=LIMIT - 1, pace=0.0)],
        [seen(0), seen(1, age=LIMIT - 1, pace=0.1, busy="compiling")],
        [seen(0), seen(1, age=LEAST, pace=0.001)],
        [seen(0), seen(1, age=STEPS * 0.5, pace=0.5)],
        [seen(0), seen(1, age=LIMIT, pace=LIMIT)],
        [seen(0), late(seen(1, age=DELAYS * 0.8, pace=0.001), 0.8)],
        [seen(0), late(seen(1, age=LIMIT, pace=0.001), LIMIT)],
        # A process that has left in good order need not send reports or make progress.
        [seen(0), seen(1, age=999.0, finished=True)],
        [seen(0), stuck(1, finished=True)],
        [seen(0, finished=True), seen(1, finished=True)],
        # Another process may have fallen silent, and be the cause of the failure.
        [seen(0), seen(1, failed="Gloo", since=HEARD)],
        [seen(0, age=GRACE - 0.5), seen(1, failed="Gloo", since=GRACE)],
    ],
)
def test_healthy_processes_have_no_diagnosis(fine):
    assert diagnose(fine, (), LIMIT) == ""


@pytest.mark.parametrize(
    ("bad", "diagnosis"),
    [
        (
            [seen(0), seen(1, age=LIMIT + 1)],
            "process 1 on host1 has said nothing for 61.0 s, last at step 3",
        ),
        (
            [seen(0), closed(seen(1, age=0.9), CLOSED + 0.1)],
            "process 1 on host1 has said nothing for 0.9 s, last at step 3: it died",
        ),
        (
            [seen(0), seen(1, age=LEAST + 0.1, pace=0.001)],
            "process 1 on host1 has said nothing for 2.1 s, last at step 3: it died,",
        ),
        (
            [seen(0), seen(1, age=STEPS * 0.5 + 0.1, pace=0.5)],
            "process 1 on host1 has said nothing for 10.1 s, last at step 3",
        ),
        (
            [seen(0), late(seen(1, age=DELAYS * 0.8 + 0.1, pace=0.001), 0.8)],
            "process 1 on host1 has said nothing for 4.1 s, last at step 3",
        ),
        (
            [seen(0), late(seen(1, age=LEAST + 0.1, pace=0.001), 0.1)],
            "process 1 on host1 has said nothing for 2.1 s, last at step 3",
        ),
        # A process fails if another process closes its connection, and that one is at
        # fault.
        (
            [seen(0, failed="Gloo"), seen(1, age=GRACE + 1)],
            "process 1 on host1 has said nothing for 6.0 s, last at step 3",
        ),
        # The first of several that have failed is at fault, if all others are alive, or
        # whatever they are after ten seconds.
        (
            [
                seen(0),
                seen(1, age=0.4, failed="KeyError: 'x'", since=HEARD + 0.5),
                seen(2, age=0.1, failed="Gloo", since=HEARD + 0.7),
            ],
            "process 1 on host1 failed at step 3: KeyError: 'x'",
        ),
        (
            [
                seen(0, age=GRACE, busy="a checkpoint"),
                seen(1, failed="KeyError: 'x'", since=2 * GRACE),
            ],
            "process 1 on host1 failed at step 3: KeyError: 'x'",
        ),
        (
            [stuck(0), stuck(1, outside=1.0, stack="  in load\n"), stuck(2)],
            "process 1 on host1 has made no progress for 61 s, at step 3; it is at\n"
            "  in load\n",
        ),
        # A checkpoint that all processes write together cannot end without process 1.
        (
            [
                seen(0, busy="a checkpoint"),
                stuck(1, outside=LIMIT + 1, stack="  in load\n"),
            ],
            "process 1 on host1 has made no progress for 61 s, at step 3; it is at\n"
            "  in load\n",
        ),
        # All processes wait for the one that is behind.
        (
            [stuck(0), stuck(1, step=2, stack="  in wait\n"), stuck(2)],
            "process 1 on host1 has made no progress for 61 s, at step 2; it is at\n"
            "  in wait\n",
        ),
    ],
)
def test_faulty_process_is_named_in_the_diagnosis(bad, diagnosis):
    assert diagnose(bad, (), LIMIT).startswith(diagnosis)


def test_process_out_of_batches_is_named_first_with_the_remedy():
    found = diagnose([stuck(0), seen(1, step=2, finished=True)], (), LIMIT)
    first, second = found.splitlines()[:2]
    assert first.startswith("process 1 on host1 has left its `Watchdog` at step 2, ")
    assert first.endswith("`train.fewest_batches(own)`")
    assert second.startswith("process 0 on host0 has made no progress for 61 s")


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(stuck(0, outside=1.0), id="another process is outside of JAX"),
        pytest.param(stuck(0, step=2), id="the others are not ahead"),
    ],
)
def test_process_gone_early_is_named_last_if_not_at_fault(bad):
    found = diagnose([bad, seen(1, step=2, finished=True)], (), LIMIT)
    assert found.startswith("process 0 on host0 has made no progress for 61 s")
    assert found.endswith("\nprocess 1 on host1 has left its `Watchdog` at step 2")


def test_process_without_a_watchdog_is_named():
    diagnosis = "process 2, 3 has not entered its `Watchdog`"
    assert diagnose([stuck(0), stuck(1)], {3, 2}, LIMIT) == diagnosis
    assert diagnose([stuck(0), seen(1)], {3, 2}, LIMIT) == ""


def test_report_is_unchanged_by_json():
    report = ProcessReport(1, "host", count=3, since=0.5, failed='a "quoted"\nline')
    assert ProcessReport.from_json(report.to_json()) == report
