"""Tests the parser of a command: its help page and the function that it runs."""

import argparse
import re

import pytest

from pipejax.cli import main
from pipejax.cli._command import add_command, add_options, new_file


def test_command_has_its_texts_and_its_function():
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers()
    command = add_command(
        commands,
        "measure",
        summary="Measure it.",
        description="Measure it\nagain.",
        example="pipejax measure --rounds 3",
        run=lambda args: args.rounds,
        options={"!--rounds N": "how often"},
    )
    args = parser.parse_args(["measure", "--rounds", "3"])
    assert args.command(args) == 3
    page = command.format_help()
    assert "Measure it\nagain." in page
    assert page.endswith("example:\n  pipejax measure --rounds 3\n")


def test_options_are_made_from_their_form_on_the_help_page():
    parser = argparse.ArgumentParser(prog="p", add_help=False)
    options = {
        "--one-core": "a flag",
        "--rounds N": "an integer",
        "--compute-ms MS": "a float",
        "--device {cpu,h100}": "a choice",
        "--sizes COUNT [COUNT ...]": "one text or several",
        "--codecs [NAME ...]": "any number of texts",
    }
    add_options(parser, options)
    words = ["--one-core", "--rounds", "3", "--compute-ms", "2.5", "--device", "h100"]
    found = vars(parser.parse_args([*words, "--sizes", "1", "4M", "--codecs"]))
    assert found == {
        **{"one_core": True, "rounds": 3, "compute_ms": 2.5, "device": "h100"},
        **{"sizes": ["1", "4M"], "codecs": []},
    }
    page = parser.format_help()
    for written, text in options.items():
        assert re.search(rf"^  {re.escape(written)}\s+{text}$", page, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "the following arguments are required: COMMAND; see `pipejax --help`"),
        (
            ["plan", "--top", "x"],
            "argument --top: invalid int value: 'x'; see `",
        ),
        (["plan", "--top", "9" * 9999], "argument --top: invalid int value: '9999"),
        (["plan", "--out", ""], "argument --out: must be the name of a file in a fold"),
        (["inspect", "a:b", "--json", "/"], "argument --json: must be the name of a"),
    ],
)
def test_wrong_arguments_are_reported_in_one_line(words, says, capsys):
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"pipejax: {says}")
    assert len(line) < 500


def test_new_file_must_be_in_an_existing_folder(tmp_path):
    name = str(tmp_path / "new.json")
    assert new_file(name) == name
    says = r"^must be the name of a file in a folder that can be written, got "
    for wrong in ("", str(tmp_path), f"{tmp_path}/gone/new.json", "a\0b", 5000 * "x"):
        with pytest.raises(argparse.ArgumentTypeError, match=says):
            new_file(wrong)
