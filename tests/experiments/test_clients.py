"""Tests that programs and optimizers of others train in pipejax as in loops by hand."""

import dataclasses
import inspect
import itertools
import json
import pathlib
import re

import jax
import optax
import pytest
from optax import contrib

import experiments.clients
from experiments.clients import (
    _compare,
    _optimizers,
    _ours,
    _pieces,
    _programs,
    _rounding,
    _table,
)

from ..grid import grid
from . import here

ROOT = pathlib.Path(__file__).parents[2]
OPTIMIZERS, PROGRAMS, WAYS = _optimizers.OPTIMIZERS, _programs.PROGRAMS, _compare.WAYS
REFUSED = [(name, way) for name in OPTIMIZERS for way in OPTIMIZERS[name].refused]
# The programs whose train steps share inputs.
SHARED = [*PROGRAMS][8:]
QUICK = ("Mean teacher: distillation", "GAN: generator and discriminator")
# Linear, and with moments.
FEW = ("sgd, momentum", "adamw")


def all_ways(names, quick):
    """Returns every name in every way that is not refused; few of them are quick."""
    return [
        pytest.param(name, way, marks=() if (name, way) in quick else pytest.mark.full)
        for name, way in itertools.product(names, WAYS)
        if (name, way) not in REFUSED
    ]


@pytest.mark.parametrize(
    ("name", "way"), all_ways(OPTIMIZERS, {*zip(FEW, itertools.cycle(WAYS))})
)
def test_optimizers_train_like_a_loop_by_hand(name, way):
    row = _compare.compared(_optimizers.client(name, 0), 0, [way])[way]
    assert _compare.within(row), row


@pytest.mark.parametrize(
    ("name", "way"),
    all_ways(
        PROGRAMS,
        {
            (next(iter(PROGRAMS)), "width 2 predicted"),
            *itertools.product(QUICK, ("width 2 plain",)),
        },
    ),
)
def test_programs_train_like_a_loop_by_hand(name, way):
    if name.startswith("Equinox"):
        pytest.importorskip("equinox")
    row = _compare.compared(PROGRAMS[name](0), 0, [way])[way]
    assert _compare.within(row), row


@pytest.mark.full
def test_teacher_averages_donated_pieces_of_a_sharded_optimizer():
    program = PROGRAMS["Mean teacher: distillation"](0)
    (student,) = program.clients
    settings = {"donate": True, "shard_optimizer": True}
    student = dataclasses.replace(student, settings=settings)
    program = dataclasses.replace(program, clients=(student,))
    row = _compare.compared(program, 0, ["width 2 plain"])["width 2 plain"]
    assert _compare.within(row), row


@grid(0, name=SHARED)
def test_other_shared_inputs_compile_nothing_anew(name, caplog, monkeypatch):
    compiled = []

    class Logged(_ours.Ours):
        def step(self, batch, shared=None):
            caplog.clear()
            with jax.log_compiles():
                super().step(batch, shared)
            programs = [x for x in caplog.messages if x.startswith("Compiling ")]
            compiled.append((self, programs))

    monkeypatch.setattr(_ours, "Ours", Logged)
    _ours.run(PROGRAMS[name](0), **WAYS["width 2 plain"].settings)
    for trainer in {trainer for trainer, _ in compiled}:
        first, *later = [programs for each, programs in compiled if each is trainer]
        assert first
        assert not any(later)


def test_shared_input_of_the_step_before_is_outside_the_bound(monkeypatch):
    class Late(_ours.Ours):
        before = None

        def step(self, batch, shared=None):
            late, self.before = self.before or shared, shared
            super().step(batch, late)

    monkeypatch.setattr(_ours, "Ours", Late)
    way, program = "width 2 plain", PROGRAMS["GAN: generator and discriminator"](0)
    row = _compare.compared(program, 0, [way])[way]
    assert row["params"]["difference"] > 100 * row["params"]["bound"]


@pytest.mark.parametrize(("name", "way"), REFUSED)
def test_refused_optimizers_are_told_the_reason(name, way):
    assert _compare.refusal(_optimizers.client(name, 0), way)


def test_missing_refusal_fails_the_comparison():
    client = dataclasses.replace(
        _optimizers.regression(0), refused={"width 1": "something"}
    )
    with pytest.raises(AssertionError, match="width 1 must be refused: something"):
        _compare.compared(client, 0, ["width 1"])


def test_loop_with_another_prediction_is_outside_the_bound(monkeypatch):
    """Compares the twin of a plain delay with a train step that uses prediction."""
    way = "width 2 plain"
    predicted = WAYS["width 2 predicted"].settings
    changed = WAYS[way]._replace(settings=predicted)
    monkeypatch.setitem(WAYS, way, changed)
    row = _compare.compared(_optimizers.client("adamw", 0), 0, [way])[way]
    assert row["params"]["difference"] > 100 * row["params"]["bound"]


@pytest.mark.full
def test_mean_without_weights_is_outside_the_bound(monkeypatch):
    """Trains lm1b with a loss that does not report its weight."""
    client = PROGRAMS["lm1b (Flax): language model, token weights"](0)
    # The last batch is left out: one device has only padding there, and a loss of 0 /
    # 0.
    client = dataclasses.replace(client, batches=client.batches[:2])
    run = _ours.run

    def unweighted(program, **settings):
        (client,) = program.clients

        def loss(params, batch):
            value, extra = client.loss(params, batch)
            return value, extra._replace(weight=None)

        return run(dataclasses.replace(client, loss=loss), **settings)

    monkeypatch.setattr(_ours, "run", unweighted)
    row = _compare.compared(client, 0, ["width 1"])["width 1"]
    assert row["params"]["difference"] > 100 * row["params"]["bound"]


def test_twins_import_nothing_of_pipejax():
    (folder,) = experiments.clients.__path__
    imports = re.compile(r"^(import|from) pipejax", re.MULTILINE)
    found = {
        path.name
        for path in pathlib.Path(folder).glob("*.py")
        if imports.search(path.read_text())
    }
    assert found == {"_ours.py"}


def made(module):
    """Returns the functions that make an optimizer, except parts of optimizers."""
    return {
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and "GradientTransformation" in str(inspect.signature(value).return_annotation)
        and not name.startswith(("scale_by_", "_"))
    }


def test_every_optimizer_of_optax_is_tried():
    tried = {name.split(",")[0].split(" ")[0] for name in OPTIMIZERS}
    aliases = {
        name
        for name in made(optax)
        if getattr(optax, name).__module__ == "optax._src.alias"
    }
    # optimistic_adam is an older form of optimistic_adam_v2. dpsgd is a chain that
    # begins with the aggregate.
    assert aliases - {"optimistic_adam"} <= tried
    parts = {"normalize", "dpsgd", "hutchinson_estimator_diag_hessian"}
    assert made(contrib) - parts <= tried


def test_rounding_is_bounded_by_the_number_of_terms():
    assert _rounding.gamma(48) == pytest.approx(48 * 2.0**-24, rel=1e-5)


def test_differences_count_nan_and_infinity():
    nan, inf = float("nan"), float("inf")
    assert _rounding.distance([1.0, nan, inf], [1.5, nan, inf]) == 0.5
    assert _rounding.distance([1.0, nan], [1.0, 2.0]) == inf
    assert _rounding.distance([], []) == 0


def test_command_line_writes_result_and_makes_tables(tmp_path, monkeypatch):
    out = tmp_path / "clients.json"
    flags = ("--ways", "width 2 plain", "--optimizers", "sgd", "sam")
    here.run(monkeypatch, "clients", "--programs", *flags, "--out", str(out))
    record = json.loads(out.read_text())
    assert record["devices"] == _pieces.DEVICES
    sgd, sam = (record["optimizers"][name]["width 2 plain"] for name in ("sgd", "sam"))
    assert _compare.within(sgd)
    assert "weight_prediction=False" in sam["refused"]
    titles, row, _ = _table.optimizers(record["optimizers"])
    assert (titles, row[0]) == (["optimizer", "width 2 plain"], "sgd")
    assert row[1].startswith("0 / ")
    _, *refused = _table.refusals(record["optimizers"])
    assert refused == [["sam", "everywhere", sam["refused"]]]
