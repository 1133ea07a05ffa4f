"""`pipejax` on the command line: each command reads arguments and calls a function."""

from ._main import main as main
