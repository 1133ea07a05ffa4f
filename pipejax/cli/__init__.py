"""The command line `pipejax`: each command reads its arguments and calls functions."""

from ._main import main as main
