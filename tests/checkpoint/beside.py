"""Restores checkpoints while another process saves them and deletes old ones."""

import contextlib
import pathlib
import re
import subprocess
import sys

import jax

from pipejax import checkpoint

from ..helpers import batches
from .helpers import init, run, train_step

STEPS = 60
GONE = r"`step` must be the step of a checkpoint in .*, which has steps .*; got \d+\."


def save(folder):
    """Saves after every step, and keeps one checkpoint."""
    train = train_step(2)
    state = init(train)
    with checkpoint.manager(folder, keep=1) as manager:
        for _ in range(STEPS):
            checkpoint.save(manager, state)
            state = run(train, state, batches(1))


def restore(folder):
    """Restores the newest checkpoint, and the newest by its number, again and again.

    Returns:
      How often a checkpoint was restored.
    """
    job = subprocess.Popen([sys.executable, "-m", __spec__.name, str(folder), "save"])
    train, count = train_step(2), 0
    like = jax.eval_shape(lambda: init(train))
    while job.poll() is None:
        if not any(path.name.isdigit() for path in folder.iterdir()):
            continue
        with checkpoint.manager(folder, read_only=True) as manager:
            checkpoint.restore(manager, train, like)
            count += 1
            with deleted():
                checkpoint.restore(manager, train, like, manager.latest_step())
    if job.returncode:
        raise AssertionError("the other process has failed")
    return count


@contextlib.contextmanager
def deleted():
    """Lets a step by its number be gone, if the error says so in this library's words.

    Any other error is raised again.
    """
    try:
        yield
    except FileNotFoundError as error:
        if not re.match(GONE, str(error)):
            raise


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 2)
    where = pathlib.Path(sys.argv[1])
    if sys.argv[2:] == ["save"]:
        save(where)
    elif restore(where) < 10:
        raise AssertionError("too few checkpoints were restored beside the job")
