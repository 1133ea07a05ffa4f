"""Property tests of codecs and collectives, on as many cases as a coffee break takes.

Claim: of more than 10,000 generated cases none breaks what the property tests state. A
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
    """As `make soak`, which writes no result."""

    tests: tuple[str, ...] = ("tests/codecs", "tests/collectives")
    """What to run, of pytest."""
    profile: str = "soak"
    """Of Hypothesis, from tests/conftest.py; it says how many cases."""
    seed: int = 0
    """Of Hypothesis."""
    least: int = 10_000
    """Cases, without which this fails."""
    out: pathlib.Path = report.RESULTS / "soak.json"
    """Where the result goes."""


def main(config: Config) -> int:
    """Runs the tests, counts cases, writes the result file; 1 for a failure."""
    jax.config.update("jax_platforms", "cpu")
    start = time.perf_counter()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", *config.tests),
            *("-m", ""),  # those that the quick run leaves out, too
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
    # What pytest says last, such as "531 passed in 60.00s"; without its statistics.
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
    """Cases that passed, from Hypothesis's statistics.

    Should these be worded otherwise one day there are none, and `main` fails.
    """
    return sum(map(int, re.findall(r"^ *- (\d+) passing\b", printed, re.MULTILINE)))


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Config, description=__doc__)))
