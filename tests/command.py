"""Runs commands that must succeed, and programs that need few modules."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]


# Programs begin with this to import modules of pipejax that do not need JAX. They start
# in a tenth of the time, because the packages around those modules stay empty.
WITHOUT_JAX = f"""
import sys, types

for name in ("pipejax", "pipejax.launch", "pipejax._internal"):
    sys.modules[name] = package = types.ModuleType(name)
    package.__path__ = [{str(ROOT)!r} + "/" + name.replace(".", "/")]
"""


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
    # JAX cannot read cached programs of absent accelerators, and compiles anew.
    cached = "ignore:Error reading persistent compilation cache entry"
    return run(sys.executable, "-W", "error", "-W", cached, "-c", code, **environment)
