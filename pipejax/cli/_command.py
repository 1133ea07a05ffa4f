"""The parsers of the command line, and the names of files to write."""

import argparse
import pathlib
from collections.abc import Callable
from typing import Any, NoReturn

from ._usage import UsageError


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, as all errors of the command line are."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message:.400}; see `{self.prog} --help`")


def new_file(text: str) -> str:
    """Returns the name of a file that can be made; as `type=` of an argument."""
    # This is checked first: minutes of measurements would be lost in the last line.
    path = pathlib.Path(text)
    try:
        possible = bool(text) and not path.is_dir() and path.parent.is_dir()
    except (OSError, ValueError):  # the name is too long, for example
        possible = False
    if not possible or "\0" in text:
        raise argparse.ArgumentTypeError(
            f"must be the name of a file in a folder that exists, got {text!r:.80}"
        )
    return text


def add_command(
    commands: Any,
    name: str,
    *,
    summary: str,
    description: str,
    example: str,
    run: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    """Adds a command without arguments, and returns its parser.

    `commands` is the result of `ArgumentParser.add_subparsers`, and `example` a command
    line for the end of the help page.
    """
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=run)
    return parser
