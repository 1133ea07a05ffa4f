"""
Runs programs with several train steps in a random order, against NumPy by hand.

All models have the same size: a sum that meets that of another step is wrong, and not
only an error.

To run the programs of some seeds alone, on one process of four devices and on two
processes of two devices each: `python -m tests.core.executors.mixed 137 138`
"""

import contextlib
import gc
import pathlib
import sys
import tempfile

import jax
import numpy as np

from .group import Group
from .losses import INPUTS, OUTPUTS
from .programs import Program
from .runs import EXAMPLES, HOSTS, Loop, Run

TOLERANCE = 1e-4
"""
The largest error of a value, absolute below 1 and relative above 1.

Predictions x w are of order 8 and the sums of 64 products, with an error in float32 of
some 8 * 8 * 2^-24 = 4e-6. Rates times slopes are below 1, for momentum after division
by 1 - 0.9, and Adam's update responds to a gradient by at most 0.02 / EPS = 2. Errors
are random, so those of a hundred updates add up to ten times that of one, 4e-5. Where
a gradient is lost, applied twice, late or taken elsewhere, the error is above 1e-3.
"""
CODED = 0.05
"""
The same for codecs with error feedback, of which `Run.repeats` also compares bits.

A block's elements are sent in 254 steps, of gradients of order 1. Half a step is still
owed by workers and half by the owner of a sum, 8e-3 in all. SGD lacks 0.3 times that.
Momentum lacks 0.1 / (1 - 0.9) times that, and Adam up to 0.02 / EPS = 2 times, 0.016.
Twice as much again is for gradients that are taken at these parameters.
"""
COUNT = 300
QUICK = (243, 253)
"""Seeds for the quick tests. Their programs cover all kinds."""


class Play:
    """
    A program that runs, with the same training by hand beside it.

    Each action is a method, which gets the number of a train step.

    Attributes:
      wrong: What differs, in words.
    """

    def __init__(self, program, folder):
        self.program, self.folder = program, pathlib.Path(folder)
        self.rng = np.random.default_rng([program.seed, 1])
        self.devices = first_devices(program.devices)
        self.wrong, self.infos = [], []
        self.runs, self.hands = ([None] * len(program.settings) for _ in range(2))
        for number in range(len(program.settings)):
            self.make(number, anew=False)

    def make(self, number, *, anew):
        setting = self.program.settings[number]
        first = {"w": self.normal(INPUTS, OUTPUTS), "b": self.normal(OUTPUTS)}
        run = (Loop if setting.loop else Run)(setting, first, self.devices, anew=anew)
        self.runs[number], self.hands[number] = run, run.by_hand()

    def make_anew(self, number):
        """Drops a train step with what it has in flight, and makes another."""
        self.runs[number] = None
        if jax.process_index() == 0:  # processes collect their garbage when they like
            gc.collect()
        self.make(number, anew=True)

    def step(self, number):
        run, hand = self.runs[number], self.hands[number]
        parts = self.parts(run)
        infos, report = run.step(parts), hand.step(parts)
        self.infos += [(number, info, report) for info in infos]

    def drain(self, number):
        infos, reports = self.runs[number].drain(), self.hands[number].drain()
        pairs = zip(infos, reports, strict=True)
        self.infos += [(number, *pair) for pair in pairs]

    def evaluate(self, number):
        """Evaluates by a program with collectives that the library does not launch."""
        run, params = self.runs[number], self.hands[number].params
        parts = self.parts(run)
        errors = [x["x"] @ params["w"] + params["b"] - x["y"] for x in parts]
        wanted = np.square(errors).mean()
        self.compare(number, "evaluated loss", run.evaluate(parts), wanted)

    def save_and_restore(self, number):
        """Saves all states first, and then goes on with new train steps."""
        del number  # of no train step alone
        kept = [(i, run) for i, run in enumerate(self.runs) if isinstance(run, Run)]
        for i, run in kept:
            run.save(self.folder / str(i))
        for i, run in kept:
            run.restore(self.folder / str(i))

    def end(self):
        """Drains all train steps, and compares them with those by hand."""
        for number, run in enumerate(self.runs):
            if isinstance(run, Run):
                self.drain(number)
        self.runs[0].join()
        for number, info, report in self.infos:
            self.check_info(number, info, report)
        for number, (run, hand) in enumerate(zip(self.runs, self.hands, strict=True)):
            for name, leaf in run.params.items():
                for shard in leaf.addressable_shards:
                    wanted = hand.params[name][shard.index]
                    self.compare(number, name, np.asarray(shard.data), wanted)
            for name, got in run.averaged.items():
                self.compare(number, name, got, hand.model_state[name])
        for number, run in enumerate(self.runs):
            if run.setting.coded and not run.repeats():
                self.wrong.append(f"train step {number} is another one when alone")

    def check_info(self, number, info, report):
        said = bool(info.arrived), bool(info.applied), int(info.skipped)
        if said != (report.arrived, report.arrived, 0):
            self.wrong.append(f"train step {number} reports {info}, not {report}")
        if report.arrived:
            self.compare(number, "loss", info.loss, report.loss)
            self.compare(number, "weight", info.weight, report.weight)
            for metric in jax.tree.leaves(info.metrics):
                self.compare(number, "metric", metric, report.error)

    def compare(self, number, name, got, wanted):
        """Notes a value that is not that by hand."""
        error = np.max(np.abs(got - wanted) / np.maximum(1, np.abs(wanted)))
        most = CODED if self.program.settings[number].coded else TOLERANCE
        if not error < most:
            self.wrong.append(f"{name} of train step {number} is off by {error:.1e}")

    def parts(self, run):
        """Returns every worker's part of a batch."""
        return [self.part(run.setting.weighted) for _ in range(run.workers)]

    def part(self, weighted):
        """Returns a worker's part of a batch, which sometimes has the weight 0."""
        keep = np.ones(EXAMPLES)
        if weighted:
            keep = self.rng.random(EXAMPLES) < self.rng.choice([0, 0.5, 1])
        x, y = (self.normal(EXAMPLES, length) for length in (INPUTS, OUTPUTS))
        return {"x": x, "y": y, "keep": np.float32(keep)}

    def normal(self, *shape):
        return np.float32(self.rng.normal(size=shape))


def first_devices(each):
    """Returns the first devices of every host. A single process plays several hosts."""
    if jax.process_count() == 1:
        return jax.devices()[: HOSTS * each]
    found = {}
    for device in jax.devices():
        found.setdefault(device.process_index, []).append(device)
    return [device for own in found.values() for device in own[:each]]


def played(program, folder):
    """Runs a program, and returns what differs from the same training by hand."""
    play = Play(program, folder)
    for action, number in program.actions:
        getattr(play, action)(number)
    play.end()
    return play.wrong


def drawn(seed, folder):
    """Runs the program of a seed."""
    return played(Program.drawn(int(seed)), folder)


def of_kinds(seed, count, *kinds):
    """Runs `count` random actions on one train step of each of some kinds."""
    devices = jax.local_device_count()
    program = Program.of_kinds(int(seed), devices, int(count), *kinds)
    with tempfile.TemporaryDirectory() as folder:
        return played(program, folder)


@contextlib.contextmanager
def alone(seed):
    """Adds to errors how to run a program alone."""
    try:
        yield
    except BaseException as error:
        command = f"python -m tests.core.executors.mixed {seed}"
        error.add_note(f"This was the program of seed {seed}. Run it alone: {command}")
        raise


def main(seeds):
    """Runs some programs on one process and on two, and prints what is wrong."""
    wrong = False
    for processes, devices in ((1, 2 * HOSTS), (2, 2)):
        with contextlib.closing(Group(processes, devices)) as group:
            for seed in seeds:
                with tempfile.TemporaryDirectory() as folder, alone(seed):
                    found = group.ask("drawn", seed, folder)
                wrong |= any(found)
                print(f"seed {seed}, processes {processes}:", *found)  # noqa: T201
    return wrong


if __name__ == "__main__":
    sys.exit(main([*map(int, sys.argv[1:])]))
