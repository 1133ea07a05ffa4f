"""A group of processes over Gloo that the tests of a module ask one task after another.

Joining and importing JAX costs each process several seconds, and a task often less.
"""

import contextlib
import json
import pathlib
import selectors
import subprocess
import sys
import tempfile
import time

from ..launch.helpers import free_port

ROOT = pathlib.Path(__file__).parents[2]
PATIENCE = 120.0
"""Seconds that a task may take."""


class GroupError(AssertionError):
    """A process raised, ended or did not answer."""


class Group:
    """Processes that run `tests.executors.worker`, until `close`.

    Args:
      processes: how many.
      devices: CPU devices of each.
    """

    def __init__(self, processes, devices=1):
        port = free_port()
        self.errors = [
            tempfile.TemporaryFile("w+")  # noqa: SIM115 - until `close`
            for _ in range(processes)
        ]
        self.running = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.executors.worker"]
                + [str(number) for number in (rank, processes, port, devices)],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
            for rank, errors in enumerate(self.errors)
        ]

    @property
    def alive(self):
        """Whether all processes run."""
        return all(process.poll() is None for process in self.running)

    def ask(self, task, *arguments, patience=PATIENCE):
        """Returns every process's result of the task, by rank.

        Raises:
          GroupError: as soon as one process has raised or ended, and after `patience`
            seconds. The others may wait for it, so all processes are ended.
        """
        try:
            self.begin(task, *arguments)
            return self._answers(time.monotonic() + patience)
        except BaseException:
            self.close()
            raise

    def begin(self, task, *arguments):
        """Gives all processes the task, and waits for nothing."""
        line = json.dumps([task, *map(str, arguments)]) + "\n"
        for process in self.running:
            with contextlib.suppress(BrokenPipeError):  # its answer is its end
                process.stdin.write(line)
                process.stdin.flush()

    def _answers(self, end):
        found = {}
        with selectors.DefaultSelector() as open_ends:
            for rank, process in enumerate(self.running):
                open_ends.register(process.stdout, selectors.EVENT_READ, rank)
            while len(found) < len(self.running):
                ready = open_ends.select(max(0.0, end - time.monotonic()))
                if not ready:
                    missing = {*range(len(self.running))} - found.keys()
                    raise GroupError(f"no answer from {sorted(missing)}")
                for key, _ in ready:
                    rank = key.data
                    answer = json.loads(key.fileobj.readline() or "{}")
                    if "result" not in answer:
                        said = answer.get("error") or self.said(rank)
                        raise GroupError(f"process {rank} failed:\n{said}")
                    found[rank] = answer["result"]
                    open_ends.unregister(key.fileobj)
        return [found[rank] for rank in range(len(self.running))]

    def said(self, rank):
        """What the process has written to its standard error."""
        self.errors[rank].seek(0)
        return self.errors[rank].read()

    def close(self):
        """Ends all processes."""
        for process in self.running:
            process.kill()
        for process, errors in zip(self.running, self.errors, strict=True):
            process.wait()
            for file in (process.stdin, process.stdout, errors):
                with contextlib.suppress(BrokenPipeError):  # a task not taken
                    file.close()
