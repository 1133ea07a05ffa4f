"""`pipejax inspect`: shows what hides a program's communication."""
# ruff: noqa: T201 - printing is what a command is for.

import argparse
import sys
from typing import Any

import jax

import pipejax as pj
from pipejax._core.executors import Fused, FusedRounds
from pipejax._core.message import at_width_1
from pipejax._internal.hlo import two_digits
from pipejax._internal.mesh import axes, inner_axes, size_along
from pipejax.overlap import (
    Report,
    difference_inside,
    inspect,
    timeline,
    topology,
)

from ._cluster import kind_flags
from ._command import add_command, write_json
from ._model import elements, examples, flags, spread
from ._program import load, types
from ._units import check
from ._usage import UsageError, in_one_line

# The state of each kind of train step.
_STATES: dict[Any, Any] = {
    pj.TrainStep: pj.PipelineState,
    pj.LocalTrainStep: pj.LocalState,
}
_STEPS = pj.TrainStep, pj.LocalTrainStep

# Programs that need no arguments.
_COMPLETE = jax.stages.Lowered, jax.stages.Compiled, str

_ALONE = """\
hint: one device has nothing to send. JAX_NUM_CPU_DEVICES=8 in the environment makes
eight devices of a CPU, and --target compiles for devices that are not there."""

EXAMPLE = "pipejax inspect my_model.py:example --target h100:1x8x8"

_DESCRIPTION = """\
Compile a program and show which of its collectives run beside compute. The
accelerators that it is compiled for need not be there. A pipelined train step
is shown together with its synchronous twin, and a local step with the chunk
beside it."""

_OPTIONS = {
    "--target TARGET": "accelerators to compile for, such as h100:1x8x8 (slices x hosts"
    " x GPUs of a host); by default the devices of this machine",
    "--fail-under X": "exit with status 1 if the share of FLOPs that run under at least"
    " one collective is below X, a number between 0 and 1; of a train step, the"
    " pipelined program counts",
    "--axis NAMES": "let `--fail-under` count only the collectives along exactly these"
    " mesh axes, such as host or host+fsdp; by default, those between groups count if"
    " the groups of a train step shard its model, and otherwise all",
    "--twin": "compare the collectives inside groups with those of the synchronous"
    " twin, and exit with status 1 if those of a kind move over 1 %% more bytes",
    "--plot PNG": "draw the schedules into this file",
    "--json FILE": "write all numbers to this file",
}


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "inspect",
        summary="Show which collectives of a program are hidden behind compute.",
        description=_DESCRIPTION,
        example=EXAMPLE,
        run=run,
        options=_OPTIONS,
    )
    parser.add_argument(
        "program",
        metavar="MODULE:FUNCTION",
        help="a module that can be imported from here, or a .py file, and a function in"
        " it; the function takes a mesh and returns (train, state, batch), with the"
        " shared input of the loss as a fourth element if it takes one, or (jitted"
        " function, *args), whose arrays may be jax.ShapeDtypeStructs, or a program"
        " that is lowered or compiled",
    )


def run(args: argparse.Namespace) -> int:
    least = args.fail_under
    if least is not None:
        check("fail-under", least, 0, 1)
    if args.axis and least is None:
        raise UsageError(f"`--axis` must come with `--fail-under`; got {args.axis}")
    if args.target:
        # Nothing is run, so leave the accelerators of this machine alone.
        jax.config.update("jax_platforms", "cpu")
    function = load(args.program)
    with in_one_line(ImportError, ValueError):
        devices = topology(args.target) if args.target else jax.devices()
    returned = function(pj.data_mesh(devices=devices))
    if isinstance(returned, _COMPLETE):
        returned = (returned,)
    programs, setting = _programs(args.program, returned)
    kind = f"{len(devices)} x {devices[0].device_kind}"
    setting = {"target": f"{args.target or 'here'}, {kind}", **setting}
    for title, value in setting.items():
        print(f"{title}: {_words(value)}")
    if len(devices) == 1:
        print(_ALONE)
    reports = {title: _inspected(*parts) for title, parts in programs.items()}
    for title, report in reports.items():
        print(f"\n{title}\n{report}")
    last = [f"{title}: {report.summary}" for title, report in reports.items()]
    print("\n" + "\n".join([*last, *_to_plan(returned)]))
    with in_one_line(ImportError, OSError, ValueError):
        if args.json:
            found = {title: report.to_dict() for title, report in reports.items()}
            record = {**setting, "jax": jax.__version__, "programs": found}
            write_json(args.json, record)
        if args.plot:
            timeline(reports, args.plot)
    met = _alike(reports, returned[0]) if args.twin else True
    if least is None:
        return int(not met)
    named = _along(args.axis, report) if args.axis else None
    covered, along = _judged(report, named, returned[0])
    return max(_verdict(f"{title}: {along}", covered, least), int(not met))


def _alike(reports: dict[str, Report], train: Any) -> bool:
    """Prints the collectives inside groups; returns whether they are as the twin's."""
    if len(reports) < 2:
        raise UsageError(
            "`--twin` must be used with a pipelined train step, which has a synchronous"
            f" twin; got {', '.join(reports)}"
        )
    titles = tuple(reports)
    twin, pipelined = reports.values()
    rows = difference_inside(twin, pipelined, train.axis_name)
    print(f"\ncollectives inside groups: {titles[0]}, {titles[1]}")
    for row in rows:
        print(f"  {row}{'' if row.alike else '  MORE'}")
    if not rows:
        print("  none")
    return all(row.alike for row in rows)


def _programs(
    name: str, returned: Any
) -> tuple[dict[str, tuple[Any, ...]], dict[str, Any]]:
    """Returns what to compile by title, and the settings of the train step by name.

    The pipelined program is the last one. Other programs than train steps have no
    settings.
    """
    parts = returned if isinstance(returned, tuple) and returned else (None,)
    if not isinstance(parts[0], _STEPS):
        jitted = callable(parts[0]) and hasattr(parts[0], "lower")
        if jitted or isinstance(parts[0], _COMPLETE):
            return {"program": parts}, {}
        raise UsageError(
            f"{name} must return (train, state, batch) with a pj.TrainStep or a"
            " pj.LocalTrainStep, (jitted function, *args), or a program that is lowered"
            f" or compiled; got {types(returned)}"
        )
    if len(parts) not in (3, 4) or not isinstance(parts[1], _STATES[type(parts[0])]):
        raise UsageError(
            f"{name} must return (train, state, batch), with the state that train.init"
            " or train.abstract_state(params) returns, or (train, state, batch,"
            f" shared); got {types(returned)}"
        )
    train, state, *inputs = parts
    executor = train.executor
    setting = {
        "executor": f"{executor.name} ({executor.reason})",
        "compiler options": train.compiler_options,
    }
    if isinstance(executor, Fused | FusedRounds):
        setting["dropped"] = executor.options.dropped
    if isinstance(train, pj.LocalTrainStep):
        return {_title(train, state): parts}, setting
    empty = state._replace(in_flight=at_width_1(state.in_flight))
    programs = {"D-Sync (K=1)": (train.plain, empty, *inputs)}
    if train.width > 1:
        programs[f"pipelined (K={train.width})"] = parts
    return programs, setting


def _title(train: pj.LocalTrainStep, state: pj.LocalState) -> str:
    found = train.rounds.config.schedule_of(state.shared.form)
    alone = "" if found.overlap_steps else ", without its exchange"
    return f"local step (H={found.sync_every}, V={found.overlap_steps}){alone}"


def _to_plan(returned: Any) -> list[str]:
    if not isinstance(returned[0], _STEPS):
        return []
    train, state, batch, *_ = returned
    known = flags(elements(state), "MS", examples(train, batch))
    mesh = train.mesh
    devices = mesh.size // size_along(mesh, train.axis_name)  # of a group
    if devices == 1 and mesh.devices.flat[0].platform != "cpu":
        devices = mesh.size // len({x.process_index for x in mesh.devices.flat})
    devices = f" --devices {devices}" if devices > 1 else ""
    return [
        "To predict its step time on a cluster, fill in N, RATE and MS: pipejax plan"
        f" --hosts N --bandwidth RATE{devices} {known}{spread(train, state)}"
        f"{kind_flags(mesh.devices.flat[0])}"
    ]


def _inspected(program: Any, *args: Any) -> Report:
    try:
        return inspect(program, *args)
    except jax.errors.JaxRuntimeError as error:
        first = str(error).splitlines()[0]
        raise UsageError(f"XLA cannot compile the program: {first:.300}") from error
    except ValueError as error:
        # Errors of pipejax begin with the wrong argument; others need their traceback.
        if not str(error).startswith("`"):
            raise
        raise UsageError(str(error)) from error


def _exchange(train: Any) -> tuple[str, ...] | None:
    """Returns the axes of the exchange, or `None` if all collectives count."""
    if not isinstance(train, _STEPS):
        return None
    data = axes(train.axis_name)
    return data if inner_axes(train.mesh, data) else None


def _along(names: str, report: Report) -> tuple[str, ...]:
    for found in report.covered_by:
        if set(found) == set(names.split("+")):
            return found
    known = ", ".join(map("+".join, report.covered_by)) or "no axis that is known"
    raise UsageError(
        "`--axis` must name the mesh axes along which some collectives run; got"
        f" {names}, and they run along {known}. The arguments of a program"
        " name its mesh by their NamedSharding."
    )


def _judged(
    report: Report, named: tuple[str, ...] | None, train: Any
) -> tuple[float | None, str]:
    """Returns the share of FLOPs to judge a program by, and what it is in words."""
    words = "share of FLOPs under at least one collective"
    if named:
        return report.covered_by[named], f"{words} along {'+'.join(named)}"
    exchange = _exchange(train)
    if exchange is None:
        return report.covered, words
    return _covered(report, exchange), f"{words} along {'+'.join(exchange)}"


def _verdict(what: str, covered: float | None, least: float) -> int:
    """Returns the exit status: 1, with a line on stderr, if `least` is not reached."""
    if covered is not None and covered >= least:
        return 0
    print(f"pipejax: {what}: {two_digits(covered)}, less than {least}", file=sys.stderr)
    return 1


def _covered(report: Report, exchange: tuple[str, ...]) -> float | None:
    """Returns the share of FLOPs under collectives over some axes of the exchange.

    An exchange in levels runs over its axes one after the other.
    """
    found = report.covered_by.items()
    shares = [share for names, share in found if names and {*names} <= {*exchange}]
    return max(shares, default=None)


def _words(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    return ", ".join(f"{k}={v!r}" for k, v in value.items()) or "none"
