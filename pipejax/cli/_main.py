"""The command line as a whole."""

import argparse
import os
import sys
from collections.abc import Sequence

import jax

import pipejax as pj

from . import _calibrate, _inspect, _launch, _plan, _profile
from ._usage import UsageError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
      argv: its arguments; `None` takes those of the process.

    Returns:
      0, or 1 if the answer is no (`--fail-under`) or nobody reads it to its end, or 2
      if the question is wrong.
    """
    parser = argparse.ArgumentParser("pipejax", description=pj.__doc__)
    parser.add_argument(
        "--version",
        action="version",
        version=f"pipejax {pj.__version__}, JAX {jax.__version__}",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (_inspect, _launch, _calibrate, _plan, _profile):
        command.add(commands)
    args = parser.parse_args(argv)
    try:
        code = args.command(args)
        sys.stdout.flush()
        return code
    except UsageError as error:
        sys.stderr.write(f"pipejax: {error}\n")
        return 2
    except BrokenPipeError:  # whoever reads has seen enough, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
