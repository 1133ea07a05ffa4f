"""The command line as a whole: its commands, its help page and its exit status."""

import argparse
import os
import sys
from collections.abc import Sequence

import jax

import pipejax as pj

from . import _calibrate, _doctor, _inspect, _launch, _plan, _profile
from ._command import Parser
from ._usage import UsageError

_COMMANDS = (_doctor, _inspect, _launch, _calibrate, _plan, _profile)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command, and returns its exit status.

    The status is 1 if `--fail-under` fails or if nobody reads the output to its end,
    and 2 if the user has to correct something. `pipejax launch` returns the status of
    the first process that fails.
    """
    parser = Parser(
        "pipejax",
        description=pj.__doc__,
        epilog="\n".join(
            [
                "examples:",
                *(f"  {command.EXAMPLE}" for command in _COMMANDS),
                "",
                "`pipejax COMMAND --help` describes a command and its arguments.",
            ]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"pipejax {pj.__version__}, JAX {jax.__version__}",
        help="show the versions of pipejax and JAX and exit",
    )
    commands = parser.add_subparsers(required=True, title="commands", metavar="COMMAND")
    for command in _COMMANDS:
        command.add(commands)
    try:
        args = parser.parse_args(argv)
        code = args.command(args)
        sys.stdout.flush()
        return code
    except UsageError as error:
        sys.stderr.write(f"pipejax: {error}\n")
        return 2
    except BrokenPipeError:  # the reader has seen enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
