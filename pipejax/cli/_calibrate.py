"""`pipejax calibrate`: measures the speeds of the cluster that it runs on."""
# ruff: noqa: T201 - printing is what a command is for.

import argparse
from typing import Any

import jax

import pipejax as pj
from pipejax import codecs, timing

from ._candidates import USUAL, candidates
from ._cluster import HOSTS, calibration, extrapolated, measured
from ._command import add_command, write_json
from ._model import Model, load_step, measured_twin, spread
from ._units import ROUNDS, VECTOR, check, count
from ._usage import enough_memory, in_one_line

EXAMPLE = "srun pipejax calibrate --out cluster.json"

_DESCRIPTION = """\
Time exchanges of several sizes between all processes, and fit the latency, the
bandwidth and the synchronisation of the cluster to these times. Measure how fast
codecs are. Print every measured time beside the time that the fit predicts, and
say whether the fit can be trusted.

Run this command on every host, started as the training itself is."""

_OPTIONS = {
    "--out FILE": "write the cluster to this file as JSON, for `pipejax plan`",
    "--codecs [NAME ...]": "codecs whose speed is measured, out of"
    f" {', '.join(codecs.NAMES)}; int4 and those that need error feedback have it; by"
    f" default {', '.join(USUAL)}",
    "--sizes COUNT [COUNT ...]": "lengths of the vectors that are exchanged, in"
    f" elements, such as 4M; by default {', '.join(f'{n:,}' for n in timing.SIZES)}",
    "--rounds N": "how often everything is measured; the fit uses medians; 7 by"
    " default",
    **HOSTS,
    "--model MODULE:FUNCTION": "also measure the compute of a model's step; the"
    " function takes a mesh and returns (train, state, batch), as for `pipejax"
    " inspect`, but with arrays; on several processes the batch is train.batch(part)",
}


def add(commands: Any) -> None:
    add_command(
        commands,
        "calibrate",
        summary="Measure latency, bandwidth and the speed of codecs on this cluster.",
        description=_DESCRIPTION,
        example=EXAMPLE,
        run=run,
        options=_OPTIONS,
        codecs=list(USUAL),
        sizes=[str(n) for n in timing.SIZES],
        rounds=7,
    )


def run(args: argparse.Namespace) -> int:
    least = 2 if args.model else 1
    check("rounds", args.rounds, least, ROUNDS)
    sizes = [count("sizes", text, VECTOR) for text in args.sizes]
    with in_one_line(ValueError, pj.launch.RollCallError):
        pj.launch.initialize()
        # JAX joins before codecs are made: some hold a key, an array on a device.
        chosen = candidates(args.codecs)
    mesh, notes = measured(args.hosts)
    # The user's code runs first: if it fails, no measurement is lost.
    model = None
    if args.model:
        program = load_step(args.model, pj.data_mesh())
        times = pj.overlap.measure(*program, rounds=args.rounds, steps=1)
        model = Model.of(program, times, measured_twin(program, args.rounds))
    with in_one_line(ValueError), enough_memory("sizes"):
        fit = timing.calibrate(mesh, chosen, sizes, rounds=args.rounds)
    if jax.process_index() == 0:
        trust = timing.trust(fit)
        print("\n".join([str(fit), *notes, f"\n{trust}"]))
        if model:
            far = extrapolated(model.elements, trust.largest)
            also = spread(program.train, program.state)
            if update := round(1e3 * model.times(fit.cluster).update, 3):
                also += f" --update-ms {update:.3f}"
            print("\n".join([*far, f"model: {model}{also}"]))
        if args.out:
            with in_one_line(OSError):
                write_json(args.out, calibration(fit))
    return 0
