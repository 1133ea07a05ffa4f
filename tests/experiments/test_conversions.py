"""Tests that public programs, converted to pipejax, train as they do themselves."""

import importlib
import json
import os
import pathlib
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.conversions import _compare, _loops, _sources, _table
from experiments.conversions.__main__ import PROGRAMS
from experiments.conversions._program import History, Program

from . import here

ROOT = pathlib.Path(__file__).parents[2]
SOURCES = os.environ.get("PIPEJAX_SOURCES")
SOURCE = """
import jax
import optax
import missing_logger
from missing_data import Loader

tx = optax.adam(0.1)


class Data(Loader):
    pass


def main():
    missing_logger.init(Data)

    @jax.jit
    def train_step(params: Unknown, opt_state, batch):
        def loss_fn(params):
            return ((batch @ params) ** 2).mean() + ((params - 1) ** 2).sum()

        loss, gradients = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return loss, optax.apply_updates(params, updates), opt_state
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(SOURCE))
    return tmp_path


def loaded(folder):
    (train,) = _sources.load((folder,), ("train",), ("missing_logger", "missing_data"))
    return train


def tiny(folder, steps=20):
    """Returns a program of one file, as the files of the package make theirs."""
    train, source = loaded(folder), (folder / "train.py").read_text()
    returns = "loss_fn(params)"
    rng = np.random.default_rng(0)
    batches = rng.normal(size=(steps, 8, 3)).astype(np.float32)
    train_step = jax.jit(_sources.function(source, "train_step", vars(train)))
    cut = _sources.function(
        source, "train_step", vars(train), before="loss, grad", returns=returns
    )

    def loss_fn(params, batch):
        return cut(params, None, batch)

    def original(params):
        opt_state, history = train.tx.init(params), History([], [])
        for batch in batches:
            loss, params, opt_state = train_step(params, opt_state, batch)
            history.params.append(params)
            history.reported.append((loss, None))
        return history

    def gradient(params, batch):
        loss, gradients = jax.jit(jax.value_and_grad(loss_fn))(params, batch)
        return (loss, None), gradients

    def delayed(params):
        return _loops.delayed(
            gradient, train.tx, params, lambda i, _: batches[i], steps
        )

    def converted(params, width):
        step = _loops.train_step(loss_fn, train.tx, width)
        return _loops.converted(
            step, step.init(params), lambda i, _: (batches[i], None), steps
        )

    start = jnp.zeros(3) - 0.5
    return Program(start, original, delayed, converted)


def test_converted_program_trains_as_the_original(folder):
    row = _compare.compared(tiny(folder), seed=0)
    assert row["moved"] > 0.5
    assert row["apart"] > 0.05
    for width in ("width 1", "width 2"):
        # Parameters are about 1, and 20 steps of Adam round each about 20 times.
        assert row[width]["params"] < 20 * 2.0**-23
        assert row[width]["reported"] < 50 * 2.0**-23
        assert 0 < row[width]["rounding"]["params"] < 50 * 2.0**-23


def test_converted_program_of_another_loss_is_found(folder):
    program = tiny(folder, steps=4)
    off = jax.tree.map(lambda x: x * 1.001, program.params)
    changed = Program(
        program.params,
        program.original,
        program.delayed,
        lambda params, width: program.converted(off, width),
    )
    row = _compare.compared(changed, seed=0)
    assert row["width 1"]["params"] > 100 * row["width 1"]["rounding"]["params"]
    assert row["width 2"]["params"] > 100 * row["width 2"]["rounding"]["params"]


def test_modules_of_a_program_are_not_left_behind(folder):
    path = list(sys.path)
    loaded(folder)
    assert not {"train", "missing_logger", "missing_data"} & set(sys.modules)
    assert sys.path == path


def test_function_inside_another_is_compiled_alone(folder):
    source = (folder / "train.py").read_text()
    names = vars(loaded(folder))
    whole = _sources.function(source, "train_step", names)
    params, batch = jnp.ones(3), jnp.zeros((2, 3))
    loss, *_ = whole(params, optax.adam(0.1).init(params), batch)
    assert loss == 0
    part = _sources.function(
        source, "train_step", names, before="updates", returns="gradients"
    )
    np.testing.assert_array_equal(part(params + 1, None, batch), 2 * jnp.ones(3))


def test_statement_inside_a_function_is_replaced(folder):
    source = (folder / "train.py").read_text()
    names, batch = vars(loaded(folder)), jnp.zeros((2, 3))
    lines = {"return ((batch @ params)": "offset = 2\nreturn (params - offset).sum()"}
    loss = _sources.function(source, "loss_fn", {"batch": batch}, lines=lines)
    assert loss(jnp.ones(3)) == -3
    step = _sources.function(source, "train_step", names, lines=lines)
    found, *_ = step(jnp.ones(3), optax.adam(0.1).init(jnp.ones(3)), batch)
    assert found == -3
    for begin, count in (("loss =", 0), ("return", 2)):
        with pytest.raises(ValueError, match=f"{count} statements begin with"):
            _sources.function(source, "train_step", names, lines={begin: "pass"})


def test_modules_stay_for_later_imports(folder):
    try:
        _sources.load(
            (folder,), ("train",), ("missing_logger", "missing_data"), stay=True
        )
        assert "train" in sys.modules
    finally:
        del sys.modules["train"]


def test_stub_of_a_class_takes_any_arguments():
    stub = _sources._Stub("missing")
    assert isinstance(stub.Loader(1, workers=2), stub.Loader)


def test_difference_to_nan_is_nan():
    assert np.isnan(_compare.distance([np.zeros(1), np.ones(2)], [np.zeros(1), np.nan]))


def test_unit_is_the_last_place_of_the_largest_number():
    assert _compare.unit([(jnp.float32(3.9), None), (np.float32(-4.1), {})]) == 2.0**-21


def test_cells_of_a_notebook_run_without_its_main(tmp_path):
    texts = ["import missing_plot\n", "def main(): return 1", "found = main()", "x = 2"]
    cells = [{"cell_type": "code", "source": [text]} for text in texts]
    path = tmp_path / "notebook.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    source, made = _sources.notebook(path, ("missing_plot",))
    assert made.x == 2
    assert made.main() == 1
    assert "found" not in source


def _row():
    """Returns the row of a program in a result."""
    part = {"params": 0.0, "reported": 1e-7}
    width = {**part, "rounding": {"params": 2e-6, "reported": 3e-7}}
    lines = {"changed": ["a", "b"], "around": ["c"]}
    numbers = {"scale": 1.0, "moved": 0.01}
    return {"width 1": width, "width 2": width, **numbers, **lines}


def test_table_shows_differences_rounding_and_lines():
    _, found = _table.programs({"tiny": _row()})
    cells = ["0 / 2.0e-06", "1.0e-07 / 3.0e-07"]
    assert found[1:5] == [cells[0], cells[0], cells[1], cells[1]]
    assert found[5:] == ["1.00", "1.0e-02", "2 + 1"]


def test_command_line_writes_result(tmp_path, folder, monkeypatch):
    module = importlib.import_module("experiments.conversions._td3")
    monkeypatch.setattr(module, "program", lambda *_: tiny(folder, steps=2))
    monkeypatch.setattr(module, "FOLDER", ".")
    monkeypatch.setattr(
        "subprocess.run", lambda *_, **__: type("Done", (), {"stdout": "abc\n"})
    )
    out = tmp_path / "conversions.json"
    flags = ("--programs", "CleanRL: TD3", "--out", str(out))
    here.run(monkeypatch, "conversions", "--sources", str(folder), *flags)
    record = json.loads(out.read_text())
    assert record["devices"] == _loops.DEVICES
    row = record["programs"]["CleanRL: TD3"]
    assert row["changed"] == list(module.CONVERSION.changed)
    assert row["keys"] == module.CONVERSION.keys


def test_run_keeps_programs_left_out(tmp_path, folder, monkeypatch):
    out = tmp_path / "conversions.json"
    old = {"commit": "abc", "date": "2026-01-01", "cpu": {"model": "old"}}
    kept = {"jaxpi: Allen-Cahn": _row(), "CleanRL: TD3": _row()}
    out.write_text(json.dumps({**old, "programs": kept}))
    module = importlib.import_module("experiments.conversions._td3")
    monkeypatch.setattr(module, "program", lambda *_: tiny(folder, steps=2))
    monkeypatch.setattr(
        "subprocess.run", lambda *_, **__: type("Done", (), {"stdout": "def\n"})
    )
    flags = ("--programs", "CleanRL: TD3", "--out", str(out))
    here.run(monkeypatch, "conversions", "--sources", str(folder), *flags)
    found = json.loads(out.read_text())["programs"]
    assert list(found) == ["CleanRL: TD3", "jaxpi: Allen-Cahn"]
    assert found["jaxpi: Allen-Cahn"] == {**old, **_row()}
    assert found["CleanRL: TD3"]["apart"] > 0


@pytest.mark.full
@pytest.mark.skipif(SOURCES is None, reason="PIPEJAX_SOURCES names no clones")
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_train_as_the_originals(tmp_path, name):
    out = tmp_path / "conversions.json"
    flags = ["--sources", SOURCES, "--programs", name, "--steps", "4"]
    # Some programs use all devices of their process, so each has its own.
    subprocess.run(
        [sys.executable, "-m", "experiments.conversions", *flags, "--out", out],
        cwd=ROOT,
        check=True,
    )
    row = json.loads(out.read_text())["programs"][name]
    for width in ("width 1", "width 2"):
        assert row[width]["params"] < row["apart"] / 100
