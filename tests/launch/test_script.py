"""Tests the script in docs/many_hosts.md as a user starts it, stopped once."""

import os
import pathlib
import re
import signal
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest

from ..epochs import by_hand
from ..test_documents import ROOT, fences

PROCESSES = 2
# The save before this batch has been written by then, and perhaps the one at this
# batch.
STOPPED_AT = "[0] epoch 1, batch 12:"


@pytest.mark.full  # in the quick run, the script runs on one process, undisturbed
@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_stopped_script_continues_and_ends_like_a_loop_by_hand(tmp_path, name):
    (text,) = fences("docs/many_hosts.md", "python")
    path = tmp_path / "train.py"
    path.write_text(text)

    said = run(path, signal.Signals[name])
    # All processes have ended in good order, so none is restarted.
    if name == "SIGTERM":
        assert "done" not in said
        said += run(path)

    assert len(re.findall(r"\[0\] goes on at epoch \d, batch \d+\n", said)) == 1
    ends = r"\[0\] end of epoch 4: .* test loss (.*), test accuracy (.*)\n\[0\] done\n"
    ((loss, accuracy),) = re.findall(ends, said)
    wanted_loss, wanted_accuracy = trained_by_hand(text)
    # The values are printed with four places. Among the 301 examples, the one closest
    # to another class is about a thousand times as far from it as rounding moves its
    # logits.
    np.testing.assert_allclose(float(loss), wanted_loss, rtol=0, atol=1e-4)
    assert accuracy == f"{wanted_accuracy:.4f}"


def test_script_runs_on_one_process_without_a_launcher(tmp_path):
    (text,) = fences("docs/many_hosts.md", "python")
    done = subprocess.run(
        [sys.executable, "-c", text, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("done\n")
    assert "end of epoch 4: " in done.stdout


def run(path, number=None):
    """Runs the script on two processes, signals one of them, and returns the output."""
    launch = [sys.executable, "-m", "pipejax.cli", "launch", "--grace", "1"]
    options = ["--processes", str(PROCESSES), "--max-restarts", "1", "--"]
    program = [sys.executable, str(path), str(path.parent / "checkpoints")]
    job = subprocess.Popen(
        [*launch, *options, *program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    said = ""
    with job:
        try:
            for line in job.stdout:
                if number and line.startswith(STOPPED_AT) and STOPPED_AT not in said:
                    os.kill(process_of_rank(1, path), number)
                said += line
        except BaseException:
            job.kill()
            raise
    assert job.returncode == 0, said
    return said


def process_of_rank(rank, path):
    """Returns the id of the process that runs the script as this rank."""
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().split(b"\0")
            variables = (process / "environ").read_bytes().split(b"\0")
        except OSError:  # the process has ended, or belongs to another user
            continue
        runs = command[1:2] == [os.fsencode(path)]
        if runs and f"JAX_PROCESS_ID={rank}".encode() in variables:
            return int(process.name)
    raise LookupError(f"no process of rank {rank}")


def trained_by_hand(text):
    """Returns the test loss and accuracy after the same batches in this process."""
    script = {"__name__": "train"}
    exec(compile(text, "train.py", "exec"), script)
    parts = [script["read"]("train", rank, PROCESSES) for rank in range(PROCESSES)]
    numbers = [len(part["y"]) // script["PART"] for part in parts]
    # Otherwise the script need not agree on a number.
    assert len(set(numbers)) == PROCESSES

    def epoch(number):
        each = [script["train_batches"](part, number) for part in parts]
        # There are as many batches as the process with the fewest has.
        return zip(*each, strict=False)

    epochs = map(epoch, range(script["EPOCHS"]))
    tx, params = optax.adamw(1e-2), script["initial_params"]()
    *_, (params, _) = by_hand(script["loss_fn"], tx, params, epochs)
    test = script["read"]("test", 0, 1)
    right = script["predict"](params, test["x"]).argmax(axis=1) == test["y"]
    return float(script["loss_fn"](params, test)), float(right.mean())


def test_batches_of_the_script_hold_every_test_example_once():
    (text,) = fences("docs/many_hosts.md", "python")
    script = {"__name__": "train"}
    exec(compile(text, "train.py", "exec"), script)
    whole = script["read"]("test", 0, 1)
    found = []
    for rank in range(3):
        part = script["read"]("test", rank, 3)
        for batch in script["test_batches"](part, 4):
            assert {len(x) for x in jax.tree.leaves(batch)} == {script["PART"]}
            found.extend(batch["x"][batch["weight"] == 1])
    assert sorted(map(tuple, found)) == sorted(map(tuple, whole["x"]))
