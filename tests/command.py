"""Runs commands that must succeed."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]


def run(*command, cwd=ROOT, **environment):
    """Returns the output of a command, and shows all of its output if it fails."""
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_python(code, **environment):
    """Runs Python code in a process of its own, with warnings as errors."""
    return run(sys.executable, "-W", "error", "-c", code, **environment)
