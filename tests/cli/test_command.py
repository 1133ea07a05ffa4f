"""Tests the parser of a command: its help page and the function that it runs."""

import argparse

from pipejax.cli._command import add_command


def test_a_command_has_its_texts_and_its_function():
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers()
    command = add_command(
        commands,
        "measure",
        summary="Measure it.",
        description="Measure it\nagain.",
        example="pipejax measure --rounds 3",
        run=lambda args: args.rounds,
    )
    command.add_argument("--rounds", type=int)
    args = parser.parse_args(["measure", "--rounds", "3"])
    assert args.command(args) == 3
    page = command.format_help()
    assert "Measure it\nagain." in page
    assert page.endswith("example:\n  pipejax measure --rounds 3\n")
