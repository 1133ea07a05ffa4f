"""`pipejax launch`: one process for each accelerator, or for a share of the cores."""

import argparse
import contextlib
import functools
import os
import pathlib
import shutil
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

from pipejax import launch
from pipejax._internal import proofs
from pipejax.launch import _guard, _recipes, _share, _start, _supervise
from pipejax.launch._account import Account, account
from pipejax.launch._standby import Reserve

from ._command import add_command
from ._units import check
from ._usage import UsageError, in_one_line

EXAMPLE = "pipejax launch --processes 4 -- python train.py"

_DESCRIPTION = """\
Start a command once for each process of this host, and watch the processes.
Each process is told its place in the job, which pipejax.launch.initialize finds.
Every line that a process prints is shown behind the rank of the process. When
one process fails, all others are ended. With --max-restarts, all processes are
then started again.

Under torchrun, srun, mpirun or Kubernetes, leave --processes out. The command is
then started once, in the place that the launcher has given."""

_OPTIONS = {
    "--processes N": "number of processes on this host; by default one for each NVIDIA"
    " GPU",
    "--hosts N": "number of hosts, each of which runs this command; 1 by default",
    "--host N": "number of this host, from 0; 0 by default",
    "--coordinator HOST:PORT": "address of host 0 and a free port there; needed for"
    " several hosts, and by default a free port of this host",
    "--max-restarts N": "how often all processes are started again after a failure; 0"
    " by default",
    "--grace SECONDS": "time that processes have to end by themselves, for example to"
    " save, before they are sent SIGTERM, and once more before they are killed; 30 by"
    " default",
    "--standby": "start a second process beside each of a running job, which imports"
    " the program and waits in pipejax.launch.initialize, so that a restart begins"
    " there; the program must call it before it changes anything",
    "--faults-per-hour X": "number of faults that the job has to expect, from which"
    " pipejax.checkpoint.snapshot chooses how often it copies; by default what the job"
    " has seen",
    "--goodput FILE": "write to this file, as JSON, how much of the time ended up in"
    " steps, and where the rest went; the same is printed at the end, and on SIGUSR1,"
    " if the program calls Watchdog.step",
    f"--print {{{','.join(_recipes.BY_NAME)}}}": "start nothing, and print how to start"
    " the program with this launcher",
    "--gpus N": "number of GPUs for each process, used only by --print; 0 for a job on"
    " CPUs, 1 by default",
}


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "launch",
        summary="Start a program once for each GPU, or on shares of the CPU cores, and"
        " watch it.",
        description=_DESCRIPTION,
        example=EXAMPLE,
        run=run,
        options=_OPTIONS,
        hosts=1,
        host=0,
        max_restarts=0,
        grace=30.0,
        gpus=1,
    )
    parser.add_argument(
        "program",
        nargs="+",
        metavar="-- COMMAND",
        help="the program to start, and its arguments",
    )


def run(args: argparse.Namespace) -> int:
    for name, least, most in (
        ("processes", 1, 4096),
        ("hosts", 1, 10**6),
        ("host", 0, 10**6),
        ("max_restarts", 0, 10**6),
        ("grace", 0, 10**6),
        ("gpus", 0, 4096),
        ("faults_per_hour", 1e-6, 1e6),
    ):
        if (value := getattr(args, name)) is not None:
            check(name.replace("_", "-"), value, least, most)
    if args.print:
        return _print(args)
    if shutil.which(args.program[0]) is None:
        raise UsageError(f"there is no program {args.program[0]!r} to run")
    _starts(args)  # wrong arguments are refused here
    return _guard.guarded(functools.partial(_run, args))


def _print(args: argparse.Namespace) -> int:
    if args.processes is None:
        raise UsageError(
            "`--processes` must be given with `--print`: their number on each host"
        )
    recipe = _recipes.Recipe(
        args.program,
        args.hosts,
        args.processes,
        args.gpus,
        args.max_restarts,
        args.grace,
    )
    with in_one_line(ValueError):
        sys.stdout.write(_recipes.BY_NAME[args.print](recipe))
    return 0


def _run(args: argparse.Namespace, received: Sequence[int]) -> int:
    file = None if args.goodput is None else pathlib.Path(args.goodput)
    reserve = Reserve(wanted=args.standby)
    with account(args.faults_per_hour, file, _say) as kept:
        signal.signal(_guard.SHOW, lambda *_: kept.show())
        try:
            return _attempts(args, received, reserve, kept)
        finally:
            reserve.end()


def _attempts(
    args: argparse.Namespace, received: Sequence[int], reserve: Reserve, kept: Account
) -> int:
    for attempt in range(args.max_restarts + 1):
        reserve.wanted = args.standby and attempt < args.max_restarts
        starts, coordinator = _starts(args)
        if received:  # a signal between two attempts, which no process can get
            return 128 + received[0]
        starts = kept.begun(starts)
        fill = functools.partial(_fill, reserve, kept, starts)
        ended = _supervise.supervise(
            starts, reserve.take(starts), args.grace, received, fill
        )
        if ended.told is not None:
            return 128 + ended.told if ended.code else 0
        if ended.first is None:
            return 0
        failed = starts[ended.first]
        # JAX aborts a process with SIGABRT when process 0 is gone. The process is then
        # only the first to fail on this host, and not the one at fault.
        aborted = (
            ended.code == -signal.SIGABRT
            and all(start.name != "0" for start in starts)  # process 0 runs elsewhere
            and not _answers(coordinator)
        )
        _say(f"process {failed.name} was the first to fail: {_how(ended.code)}")
        if aborted:
            _say(
                f"JAX has aborted it: process 0, at {coordinator}, is gone. Look there."
            )
        if len(starts) > 1:  # other processes may have printed since
            _say("its last lines:\n" + "".join(ended.lines).rstrip())
        if attempt < args.max_restarts:
            _say(f"starting again, {attempt + 1} of {args.max_restarts} times")
    if aborted:
        return launch.FAULT
    return ended.code if ended.code > 0 else 128 - ended.code


def _fill(reserve: Reserve, kept: Account, starts: Sequence[_start.Start]) -> None:
    if kept.settled():
        reserve.fill(starts)


def _starts(args: argparse.Namespace) -> tuple[list[_start.Start], str]:
    with in_one_line(ValueError):
        place = launch.detect() if args.hosts == 1 else None
        if place is not None and not args.processes:
            start = _start.Start(str(place.rank), args.program, os.environ)
            return [start], place.coordinator
        if place is not None and place.processes > 1:
            raise UsageError(
                f"`--processes` must be left out under {place.launcher}, which has"
                f" started {place.processes} processes itself. To start others, give"
                " `--hosts`, `--host` and `--coordinator`, and run `pipejax launch`"
                " once on each host"
            )
        job, gpus = _job(args)
        environments = [_share.environment(job, i, gpus) for i in range(job.processes)]
        if job.hosts == 1:
            secret = {proofs.VARIABLE: proofs.drawn()}  # of the whole job
            environments = [{**variables, **secret} for variables in environments]
    starts = []
    for local, variables in enumerate(environments):
        cores = None if gpus else _share.cores(local, job.processes)
        name, environ = str(job.rank(local)), {**variables, **os.environ}
        # The user's own variables win, except for the place in the job.
        environ |= {key: variables[key] for key in variables if key.startswith("JAX_")}
        starts.append(_start.Start(name, args.program, environ, cores))
    return starts, job.coordinator


def _job(args: argparse.Namespace) -> tuple[_share.Job, int]:
    gpus = 0 if os.environ.get("JAX_PLATFORMS") == "cpu" else _share.gpus(os.environ)
    processes = args.processes or gpus
    if not processes:
        raise UsageError(
            "`--processes` must be given where there are no NVIDIA GPUs. On CPUs, each"
            " process gets its share of the cores"
        )
    if args.hosts > 1 and args.coordinator is None:
        raise UsageError(
            "`--coordinator` must be given with more than one host. Give an address of"
            " host 0 that all others reach, and a port that is free there"
        )
    coordinator = args.coordinator or f"127.0.0.1:{_free_port()}"
    return _share.Job(processes, args.hosts, args.host, coordinator), gpus


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5.0).close()
    except OSError:
        return False
    return True


def _how(code: int) -> str:
    if code > 0:
        return f"exit status {code}"
    return f"ended by {signal.Signals(-code).name}"


def _say(what: str) -> None:
    """Prints a line of `pipejax launch` itself, after all that the processes said."""
    # Nobody may read it any more, or the disk be full. The job goes on.
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"pipejax: {what}\n")
        sys.stderr.flush()
