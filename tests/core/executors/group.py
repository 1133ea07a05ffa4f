"""
Runs a group of processes over Gloo, which does one task after another for the tests.

Each process takes several seconds to join and to import JAX, and a task often less.
"""

import contextlib
import json
import os
import pathlib
import selectors
import subprocess
import sys
import tempfile
import time

from pipejax._internal.threads import needed

from ...launch.helpers import free_port

ROOT = pathlib.Path(__file__).parents[3]
PATIENCE = 120.0
"""Seconds that a task may take."""


class GroupError(AssertionError):
    """Error that a process has raised an exception, ended, or not answered."""


class Group:
    """
    Processes that run `tests.core.executors.worker` until `close`.

    Args:
      processes: The number of processes.
      devices: The number of CPU devices of each process.
    """

    def __init__(self, processes, devices=1):
        port = free_port()
        self.errors = [
            tempfile.TemporaryFile("w+")  # noqa: SIM115 - until `close`
            for _ in range(processes)
        ]
        self.running = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.core.executors.worker"]
                + [str(number) for number in (rank, processes, port, devices)],
                cwd=ROOT,
                # As few threads as a user has on a host with few cores.
                env={**os.environ, "NPROC": str(needed(devices))},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
            for rank, errors in enumerate(self.errors)
        ]

    @property
    def alive(self):
        """Returns whether all processes run."""
        return all(process.poll() is None for process in self.running)

    def ask(self, task, *arguments, patience=PATIENCE):
        """
        Returns every process's result of the task, by rank.

        Raises:
          GroupError: As soon as one process has raised or ended, or after `patience`
            seconds. The others may wait for it, so all processes are ended.
        """
        try:
            self.begin(task, *arguments)
            return self._answers(time.monotonic() + patience)
        except BaseException:
            self.close()
            raise

    def begin(self, task, *arguments):
        """Gives the task to all processes, and returns at once."""
        line = json.dumps([task, *map(str, arguments)]) + "\n"
        for process in self.running:
            # The process has ended, which `_answers` notices.
            with contextlib.suppress(BrokenPipeError):
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
        """Returns the text that a process has written to its standard error."""
        self.errors[rank].seek(0)
        return self.errors[rank].read()

    def close(self):
        """Ends all processes."""
        for process in self.running:
            process.kill()
        for process, errors in zip(self.running, self.errors, strict=True):
            process.wait()
            for file in (process.stdin, process.stdout, errors):
                # The process has not read its task.
                with contextlib.suppress(BrokenPipeError):
                    file.close()
