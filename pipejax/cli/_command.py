"""The parser of one command of the command line."""

import argparse
from collections.abc import Callable
from typing import Any


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

    Args:
      commands: The result of `ArgumentParser.add_subparsers`.
      name: The name of the command.
      summary: One sentence for the list of commands.
      description: The text at the top of the command's own help page.
      example: A command line that is shown at the end of that page.
      run: The function that runs the command and returns its exit status.
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
