"""Runs the property tests of codecs and collectives on more than 10,000 cases.

Claim: none of more than 10,000 generated cases breaks what the property tests state. A
case of `tests/codecs` is a batch of vectors, one of each family, under one codec.

Command: python -m experiments.soak
Time: about 10 minutes on 2 cores.
Result: experiments/results/soak.json
"""

import dataclasses
import pathlib
import re
import subprocess
import sys
import time

import jax
import tyro

from . import report

ROOT = pathlib.Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the tests. `make soak` runs them too, but writes no result."""

    tests: tuple[str, ...] = ("tests/codecs", "tests/collectives")
    """Tests to run, as arguments of pytest."""
    profile: str = "soak"
    """Profile of Hypothesis in tests/conftest.py, which sets the number of cases."""
    seed: int = 0
    """Seed of Hypothesis."""
    least: int = 10_000
    """Number of cases below which this experiment fails."""
    out: pathlib.Path = report.RESULTS / "soak.json"
    """File to write the result to, as JSON."""


def main(config: Config) -> int:
    """Runs the tests, counts their cases, and writes the result file.

    Returns:
      The exit code, which is 1 if a test fails or if there are too few cases.
    """
    jax.config.update("jax_platforms", "cpu")
    start = time.perf_counter()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", *config.tests),
            *("-m", ""),  # also the tests that the quick run leaves out
            f"--hypothesis-profile={config.profile}",
            f"--hypothesis-seed={config.seed}",
            "--hypothesis-show-statistics",
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    cases = counted(done.stdout)
    # The last line of pytest, such as "531 passed in 60.00s", without the statistics.
    tests = done.stdout.rstrip().rpartition("\n")[2].strip("= ")
    print(f"{cases:,} cases; {tests}")
    if done.returncode or cases < config.least:
        print(done.stdout, file=sys.stderr)
        print(f"Failed, or fewer than {config.least:,} cases.", file=sys.stderr)
        return 1
    report.save(
        config.out,
        seed=config.seed,
        profile=config.profile,
        cases=cases,
        tests=tests,
        seconds=round(time.perf_counter() - start, 1),
    )
    return 0


def counted(printed: str) -> int:
    """Returns the number of passed cases, from the statistics of Hypothesis.

    If a version of Hypothesis words its statistics differently, the number is 0, so
    that `main` fails.
    """
    return sum(map(int, re.findall(r"^ *- (\d+) passing\b", printed, re.MULTILINE)))


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Config, description=__doc__)))
