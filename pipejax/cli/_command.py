"""The parsers of the command line, and the names of files to write."""

import argparse
import json
import os
import pathlib
from collections.abc import Callable, Mapping
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
        possible = bool(text) and not path.is_dir() and os.access(path.parent, os.W_OK)
    except (OSError, ValueError):  # the name is too long, for example
        possible = False
    if not possible or "\0" in text:
        raise argparse.ArgumentTypeError(
            "must be the name of a file in a folder that can be written, got"
            f" {text!r:.80}"
        )
    return text


def write_json(path: str, record: Any) -> None:
    """Writes a record to a file; a number that is not finite is a `ValueError`."""
    text = json.dumps(record, indent=2, allow_nan=False)
    pathlib.Path(path).write_text(text + "\n")


# The type of an option's value, by its placeholder on the help page.
_TYPES: dict[str, Callable[[str], object]] = {
    **dict.fromkeys(("FILE", "PNG"), new_file),
    **dict.fromkeys(("MS", "US", "SECONDS", "X"), float),
    "N": int,
}


def add_command(
    commands: Any,
    name: str,
    *,
    summary: str,
    description: str,
    example: str,
    run: Callable[[argparse.Namespace], int],
    options: Mapping[str, str],
    **defaults: Any,
) -> argparse.ArgumentParser:
    """Adds a command with its options and their defaults, and returns its parser.

    `commands` is the result of `ArgumentParser.add_subparsers`, and `example` a command
    line for the end of the help page. See `add_options` for `options`.
    """
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser, options)
    parser.set_defaults(command=run, **defaults)
    return parser


def add_options(parser: argparse.ArgumentParser, options: Mapping[str, str]) -> None:
    """Adds options with their help texts, each as the help page writes it.

    Examples are `--one-core`, which takes no value, `--rounds N`, `--device {a,b}`,
    `--sizes COUNT [COUNT ...]` for at least one value and `--codecs [NAME ...]` for any
    number. An option that begins with `!` is required.
    """
    for written, text in options.items():
        flag, _, value = written.removeprefix("!").partition(" ")
        if not value:
            parser.add_argument(flag, action="store_true", help=text)
            continue
        word, several = value.strip("[]").split(" ")[0], value.endswith("...]")
        choices = word[1:-1].split(",") if word.startswith("{") else None
        parser.add_argument(
            flag,
            required=written.startswith("!"),
            nargs=("*" if value.startswith("[") else "+") if several else None,
            metavar=None if choices else word,
            choices=choices,
            type=_TYPES.get(word, str),
            help=text,
        )
