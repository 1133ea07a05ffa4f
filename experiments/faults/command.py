"""Builds the commands that start the program of these experiments on a host."""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from .provoke import Fault


def program(
    config: Any, names: Iterable[str], folder: str, faults: Sequence[Fault] = ()
) -> list[str]:
    """Returns the command of `experiments.faults.program`.

    Args:
      config: The settings of an experiment.
      names: The settings that the program has too.
      folder: The folder of the checkpoints.
      faults: The faults that the program provokes.
    """
    command = [sys.executable, "-m", f"{__package__}.program", "--folder", folder]
    for name in names:
        command += [f"--{name}", str(getattr(config, name))]
    if faults:
        command += ["--faults", *(str(part) for fault in faults for part in fault)]
    return command


def returning(command: Sequence[str]) -> list[str]:
    """Returns a command that runs another, and runs it again whenever it is killed.

    It stands for a host that is lost, and that starts the command anew when it returns.
    """
    again = 'while "$@"; status=$?; [ $status = 137 ]; do :; done; exit $status'
    return ["sh", "-c", again, "sh", *command]


def launched(
    command: Sequence[str], restarts: int, grace: float, *more: str
) -> list[str]:
    """Returns the command that runs a program under `pipejax launch`."""
    launch = [sys.executable, "-m", "pipejax.cli", "launch"]
    options = ["--max-restarts", str(restarts), "--grace", str(grace), *more]
    return [*launch, *options, "--", *command]
