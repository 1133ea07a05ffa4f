"""`pipejax doctor`: measures a machine or a job, and says what to choose for it."""
# ruff: noqa: T201 - printing is what a command is for.

import argparse
import platform
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import optax
from jax.sharding import Mesh

import pipejax as pj
from pipejax import timing
from pipejax._core.executors import Fused, FusedRounds
from pipejax.codecs import Codec
from pipejax.launch import Place

from ._candidates import USUAL, candidates
from ._cluster import HOSTS, kind_flags, measured
from ._command import add_command, write_json
from ._delayed import merged_flags
from ._diagnosis import Advice, Diagnosis, Overlap, to_plan
from ._doctor_picture import picture
from ._model import Model, RunnableStep, elements, load_step, measured_twin, spread
from ._rows import chosen, in_rounds
from ._units import COMPUTE_MS, ROUNDS, check, count
from ._usage import UsageError, in_one_line

EXPOSED = 1.25
"""The ratio of step time to compute above which local steps are shown, too."""
EXAMPLE = "srun pipejax doctor --parameters 300M --compute-ms 250"

_DESCRIPTION = """\
Measure whether communication overlaps with compute on these devices, and how fast
links and codecs are. Predict the step time of your model, synchronous and
pipelined, and print the recommended train step as Python. Takes about two minutes.

Run this command on one machine, or on every host of a job, started as the training
itself is."""

_OPTIONS = {
    "--model MODULE:FUNCTION": "your model; the function takes a mesh and returns"
    " (train, state, batch) with arrays, as for `pipejax calibrate`; without it, an MLP"
    " is measured",
    "--parameters COUNT": "number of your model's parameters, such as 300M, in place of"
    " --model",
    "--compute-ms MS": "milliseconds that one device computes in a step of your model",
    **HOSTS,
    "--codecs [NAME ...]": "codecs to consider, each as `pipejax calibrate` measures"
    f" it; by default {', '.join(USUAL)}",
    "--rounds N": "how often everything is measured; medians count; 3 by default",
    "--json FILE": "write all findings to this file",
    "--plot PNG": "draw measured and predicted times into this file",
}


def add(commands: Any) -> None:
    add_command(
        commands,
        "doctor",
        summary="Measure this machine or job, and recommend a train step for a model.",
        description=_DESCRIPTION,
        example=EXAMPLE,
        run=run,
        options=_OPTIONS,
        codecs=list(USUAL),
        rounds=3,
    )


def run(args: argparse.Namespace) -> int:
    model = _described(args)
    with in_one_line(ValueError, pj.launch.RollCallError):
        place = pj.launch.initialize()
        # JAX joins before codecs are made: some hold a key, an array on a device.
        codecs = candidates(args.codecs)
    mesh = pj.data_mesh()
    given = mesh.size > 1 or args.hosts is not None
    hosts, notes = measured(args.hosts) if given else (mesh, [])
    program = load_step(args.model, mesh) if args.model else _example(mesh)
    times = pj.overlap.measure(*program, rounds=args.rounds, steps=1)
    model = model or Model.of(program, times, measured_twin(program, args.rounds))
    fit = None
    if mesh.size > 1:
        fit = timing.calibrate(hosts, codecs, timing.SIZES, args.rounds)
    if jax.process_index() != 0:
        return 0
    shared, device = spread(program.train, program.state), mesh.devices.flat[0]
    # On CPUs, hosts are often emulated, and have one name.
    several = bool(notes) and device.platform != "cpu"
    plan = ""
    if fit and (shared or several):
        why = "share a model, an optimizer or a round" if shared else "share hosts"
        plan = to_plan(why, f"{model}{shared}{kind_flags(device)}")
    advice = _advice(fit, model, program, codecs) if fit and not plan else None
    executor = program.train.executor
    overlap = Overlap(
        args.model or "a built-in MLP", f"{executor.name} ({executor.reason})", times
    )
    options = (
        executor.options if isinstance(executor, Fused | FusedRounds) else ({}, {})
    )
    found = Diagnosis(_here(mesh, place), *options, overlap, fit, notes, advice, plan)
    print(found)
    with in_one_line(ImportError, OSError, ValueError):
        if args.json:
            write_json(args.json, found.to_dict())
        if args.plot:
            picture(found, args.plot)
    return 0


def _advice(
    fit: timing.Fit, model: Model, program: RunnableStep, codecs: Mapping[str, Codec]
) -> Advice:
    """Returns what to choose if every device has all of the model and the optimizer."""
    mesh = program.train.mesh
    one_core = mesh.devices.flat[0].platform == "cpu"
    cluster, n = fit.cluster, model.elements
    compute = model.times(cluster)
    ways = timing.plan(cluster, n, compute, codecs, one_core=one_core)
    best, rounds = chosen(ways), []
    if best.ratio > EXPOSED:
        # Only hosts exchange, each device its share of the parameters.
        own, part = timing.sharded(cluster), cluster.shard(n)
        alone = timing.plan(own, part, compute, codecs, one_core=one_core)
        averaging = compute.averaging(timing.mean_inside_hosts(cluster, n))
        rounds = in_rounds(alone, codecs, averaging, one_core=one_core)
        rounds = [way for way in rounds if way.step < best.step]
    # CPUs exchange nothing beside a backward pass.
    delayed = None if one_core else _least_delay(program, model, best)
    return Advice(model, ways, cluster, delayed, rounds, one_core)


def _least_delay(program: RunnableStep, model: Model, way: timing.RankedConfig) -> Any:
    """Returns which gradients a way must delay, or `None` if all, or if unknown.

    The size of a model that is given in numbers says nothing about its arrays. The host
    executor exchanges nothing beside a backward pass, nor does a local step.
    """
    train, state, batch, shared = program
    if not (isinstance(train, pj.TrainStep) and isinstance(state, pj.PipelineState)):
        return None
    given = elements(state) == model.elements
    if way.config.width == 1 or not given or train.executor.name != "fused":
        return None
    compute, exchange = model.compute / 1e3, way.exchange.total
    flags = pj.overlap.least_delay(
        train, state, batch, shared, compute=compute, exchange=exchange
    )
    flags = merged_flags(flags)
    return None if flags is True else flags


def _described(args: argparse.Namespace) -> Model | None:
    check("rounds", args.rounds, 2, ROUNDS)
    numbers = args.parameters, args.compute_ms
    if numbers == (None, None):
        return None
    if None in numbers or args.model:
        raise UsageError(
            "`--parameters` and `--compute-ms` must be given together, and without"
            f" `--model`; got {args.parameters}, {args.compute_ms} and {args.model}"
        )
    check("compute-ms", args.compute_ms, *COMPUTE_MS)
    return Model(count("parameters", args.parameters), args.compute_ms)


def _here(mesh: Mesh, place: Place | None) -> dict[str, str]:
    device = mesh.devices.flat[0]
    return {
        "devices": f"{mesh.size} x {device.device_kind} ({device.platform})",
        "processes": f"{jax.process_count()}"
        + (f", started by {place.launcher}" if place else ""),
        "versions": f"pipejax {pj.__version__}, JAX {jax.__version__}, jaxlib"
        f" {jaxlib.__version__}, Python {platform.python_version()}",
    }


def _example(mesh: Mesh) -> RunnableStep:
    """Returns a train step of an MLP of 4 million parameters, for any devices."""

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x = batch
        for weights in params:
            x = jnp.tanh(x @ weights)
        return jnp.mean(x**2)

    train = pj.make_train_step(loss_fn, optax.adamw(1e-3), mesh=mesh)
    keys = jax.random.split(jax.random.key(0), 4)
    params = [jax.random.normal(key, (1024, 1024)) / 32 for key in keys]
    local = mesh.size // jax.process_count()
    batch = train.batch(jnp.ones((64 * local, 1024)))
    return RunnableStep(train, train.init(params), batch)
