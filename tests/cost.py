"""
Reports the ten most expensive tests at the end of a run, in processor seconds.

Processor seconds of the test's process and of the processes it has started and waited
for are the same on a busy machine as on an idle one. Wall-clock seconds are not.
"""

import os
import resource

import pytest

SHOWN = 10
MOST = 20.0
_PROPERTY = "processor seconds"


def processor_seconds() -> float:
    """Returns the processor seconds of this process and its ended children."""
    parts = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(part.ru_utime + part.ru_stime for part in parts)


class Costs:
    """A pytest plugin: workers measure costs, and the test reports carry them."""

    def __init__(self) -> None:
        self._found: dict[str, float] = {}
        self._start = 0.0

    def pytest_runtest_logstart(self) -> None:
        self._start = processor_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call):
        report = yield
        if call.when == "teardown":
            spent = processor_seconds() - self._start
            report.user_properties.append((_PROPERTY, spent))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if _PROPERTY in (properties := dict(report.user_properties)):
            self._found[report.nodeid] = properties[_PROPERTY]

    def pytest_terminal_summary(self, terminalreporter) -> None:
        slowest = sorted(self._found.items(), key=lambda item: -item[1])[:SHOWN]
        total, load = sum(self._found.values()), os.getloadavg()[0]
        write = terminalreporter.write_line
        terminalreporter.section(
            f"{total:.0f} processor seconds in {len(self._found)} tests, machine's load"
            f" {load:.1f} on {os.cpu_count()} cores; the most expensive:"
        )
        for name, seconds in slowest:
            write(f"{seconds:7.1f} {name}")
        if slowest and slowest[0][1] > MOST:
            write(
                f"Above {MOST:.0f} s, a test is taken apart or marked `full`:"
                " see CONTRIBUTING.md.",
                yellow=True,
            )
