"""Tests that the programs in docs/examples learn, in small, and continue."""

import re
import runpy
import sys

import numpy as np
import pytest

from .command import ROOT, run

FOLDER = ROOT / "docs/examples"
PROGRAMS = ["mnist", "cifar10", "nanogpt", "lora", "hsdp"]
MODEL = "gpt"  # of nanogpt, in a file of its own


def loaded(name):
    """Returns the names in a program. The program itself does not run."""
    return runpy.run_path(str(FOLDER / f"{name}.py"))


def launched(name, *options, devices=1, path=ROOT):
    """Runs a program on two processes, and returns what it has printed."""
    launch = [sys.executable, "-m", "pipejax", "launch", "--processes", "2", "--"]
    program = [sys.executable, FOLDER / f"{name}.py", *options]
    environment = {"JAX_NUM_CPU_DEVICES": str(devices), "PYTHONPATH": str(path)}
    return run(*launch, *program, **environment)


def test_mnist_program_learns():
    found = loaded("mnist")
    config = found["Config"](epochs=3, hidden=32, batch=64)
    assert found["main"](config) > 0.9  # 0.1 by chance


@pytest.mark.full
def test_cifar_program_learns_and_continues_after_its_last_epoch(tmp_path, capsys):
    found = loaded("cifar10")
    small = {"folder": str(tmp_path), "batch": 64, "features": 4}
    found["main"](found["Config"](epochs=2, **small))
    assert "epoch 1: " in capsys.readouterr().out
    assert found["main"](found["Config"](epochs=4, **small)) > 0.3  # 0.1 by chance
    said = capsys.readouterr().out
    assert re.findall(r"epoch (\d)", said) == ["2", "3"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "shape"), [("mnist", (28, 28, 1)), ("cifar10", (32, 32, 3))]
)
def test_programs_read_data_sets_of_tfds(tmp_path, name, shape):
    pytest.importorskip("tensorflow_datasets")
    from .experiments.test_data import write

    write(tmp_path, shape=shape)
    (folder,) = tmp_path.glob("*/*/dataset_info.json")
    data = loaded(name)["load"]("train", str(folder.parent))
    assert data["image"].shape == (12, *(shape[:2] if name == "mnist" else shape))
    np.testing.assert_array_equal(np.sort(data["label"]), np.repeat([0, 1, 2], 4))


SMALL = ["--length", "16", "--layers", "1", "--width", "32", "--part", "4"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "options"),
    [("nanogpt", ["--hosts", "2", "--log", "10"]), ("hsdp", [])],
)
def test_text_programs_learn_on_two_processes_and_continue(tmp_path, name, options):
    """The second run finds the checkpoint of the first, and trains on."""
    if name == "nanogpt":
        pytest.importorskip("grain")
    given = [*SMALL, *options, "--test", "30", "--rate", "1e-2"]
    given += ["--folder", tmp_path]
    first = launched(name, *given, "--steps", "30", devices=2)
    then = launched(name, *given, "--steps", "60", devices=2)
    losses = [float(x) for x in re.findall(r"test loss ([\d.]+)", first + then)]
    assert len(losses) == 2
    assert losses[1] < losses[0] < 3.5  # 5.5 by chance, among 256 bytes
    assert "[0] 30" in first
    assert "[0] 30" not in then
    assert "[0] 60" in then
    if name == "nanogpt":
        assert re.search(r"\[0\] 29 loss \S+ norm \S+ rate \S+\n", first)
        assert "test loss of the average" in then


WANDB = """
class Run:
    def log(self, found, step):
        print("logged", step, *found)

def init(project, id, resume):
    print("run", project, id, resume)
    return Run()
"""


@pytest.mark.full
def test_nanogpt_program_logs_to_the_run_of_its_folder(tmp_path):
    """Only process 0 logs, to a run with the name of the folder of checkpoints."""
    pytest.importorskip("grain")
    (tmp_path / "wandb.py").write_text(WANDB)
    given = [*SMALL, "--steps", "4", "--log", "2", "--test", "4", "--hosts", "2"]
    given += ["--project", "texts", "--folder", tmp_path / "first"]
    said = launched("nanogpt", *given, path=f"{ROOT}:{tmp_path}")
    assert said.count("run texts first allow") == 1
    assert said.count("logged 3 loss norm rate") == 1
    assert said.count("logged 4 test loss test loss of the average") == 1


@pytest.mark.full
def test_nanogpt_program_runs_without_a_launcher(tmp_path):
    pytest.importorskip("grain")
    options = [*SMALL, "--steps", "4", "--folder", tmp_path]
    said = run(sys.executable, FOLDER / "nanogpt.py", *options, PYTHONPATH=str(ROOT))
    assert "4 test loss" in said


@pytest.mark.full
def test_lora_program_sends_and_saves_adapters_alone(tmp_path):
    said = launched("lora", "--before", "120", "--after", "60", "--folder", tmp_path)
    rows = re.findall(r": ([\d,]+) bytes a step, loss (\S+) -> (\S+)\n", said)
    sent = [int(row[0].replace(",", "")) for row in rows]
    assert sent[1] < sent[0] / 4
    assert all(float(last) < float(first) for _, first, last in rows)
    saved = np.load(tmp_path / "adapters.npz")
    assert all("lora" in name for name in saved)


def test_every_program_has_a_page_in_the_index():
    assert {path.stem for path in FOLDER.glob("*.py")} == {*PROGRAMS, MODEL}
    index = (FOLDER / "index.md").read_text()
    for name in PROGRAMS:
        page = (FOLDER / f"{name}.md").read_text()
        assert f"```{{literalinclude}} {name}.py\n" in page
        assert f"]({name}.md)" in index
