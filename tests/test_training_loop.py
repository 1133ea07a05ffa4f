"""Tests that the code of docs/training_loop.md runs and logs the right numbers."""

import importlib.util
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pipejax as pj

from .command import ROOT, run_python
from .epochs import by_hand
from .reference import split
from .test_documents import fences

pytestmark = pytest.mark.full  # tests/train_step has the metrics and the drain
DEVICES, BATCHES, EPOCHS, EVERY = 4, 25, 2, 10
# A stand-in for Weights & Biases, as far as the page uses it.
WANDB = """
import json, os

rows, settings = [], {}

def init(**given):
    settings.update(given)

def log(data, step=None):
    if rows and step < rows[-1][0]:
        raise ValueError(f"step {step} after {rows[-1][0]}: it would be dropped")
    rows.append([step, {name: float(value) for name, value in data.items()}])

def finish():
    with open(os.environ["ROWS"], "w") as file:
        json.dump([settings, rows], file)
"""


def installed(module):
    return importlib.util.find_spec(module) is not None


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Runs the page, without TensorBoard if that is not installed."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "wandb.py").write_text(WANDB)
    blocks = [
        block
        for block in fences("docs/training_loop.md", "python")
        if installed("tensorboardX") or "tensorboardX" not in block
    ]
    variables = {
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
        "ROWS": str(folder / "rows.json"),
        "TMPDIR": str(folder),
    }
    run_python("\n".join(blocks), **variables)
    return folder


def test_logged_values_equal_a_loop_by_hand(ran):
    settings, rows = json.loads((ran / "rows.json").read_text())
    assert settings == {"project": "digits", "id": "digits-1", "resume": "allow"}
    wanted = logged_by_hand()
    assert [step for step, _ in rows] == [step for step, _ in wanted]
    for (_, row), (_, by_name) in zip(rows, wanted, strict=True):
        assert by_name.keys() <= row.keys()
        for name, value in by_name.items():
            # The bound allows for rounding: 50 updates of AdamW change losses by less
            # than 1e-5.
            np.testing.assert_allclose(row[name], value, rtol=1e-4, err_msg=name)


def logged_by_hand():
    """Returns the steps and scalars of the log, from a loop without pipejax."""
    page = {"jax": jax, "jnp": jnp, "np": np, "optax": optax, "pj": pj}
    _, data_and_loss, *_ = fences("docs/training_loop.md", "python")
    exec(data_and_loss, page)

    def loss(params, batch):
        return page["loss_fn"](params, batch)[0]

    epochs = [
        [split(batch, DEVICES) for batch in page["batches"](page["data"], epoch)]
        for epoch in range(EPOCHS)
    ]
    assert {len(epoch) for epoch in epochs} == {BATCHES}
    found = by_hand(loss, optax.adamw(1e-2), page["params"], epochs)
    rows, losses, logged = [], [], 0
    for number, (params, of_epoch) in enumerate(found):
        losses += of_epoch
        for call in range(number * BATCHES + 1, len(losses) + 1):
            if call % EVERY == 0:
                # All batches but the newest have arrived since the last line.
                mean = np.mean(losses[logged : call - 1])
                rows.append((call - 1, {"train/loss": mean}))
                logged = call - 1
        test_loss, aux = page["loss_fn"](params, page["test"])
        scalars = {
            "epoch/train_loss": np.mean(of_epoch),
            "epoch/test_loss": test_loss,
            "epoch/test_accuracy": aux.metrics["accuracy"],
        }
        rows.append((len(losses), scalars))
    return rows


@pytest.mark.skipif(not installed("tensorboardX"), reason="no tensorboardX here")
def test_tensorboard_file_holds_the_logged_numbers(ran):
    _, rows = json.loads((ran / "rows.json").read_text())
    wanted = {(step, name): value for step, row in rows for name, value in row.items()}
    (file,) = ran.glob("*/events.*")
    found = dict(scalars(file.read_bytes()))
    assert found == {key: np.float32(value) for key, value in wanted.items()}


def scalars(content):
    """
    Yields `(step, name), value` from a file of TensorBoard events.

    A file is a sequence of records. Each has 8 bytes with a length, 4 bytes of
    checksum, an event of that length, and 4 bytes of checksum.
    """
    from tensorboardX.proto.event_pb2 import Event

    while content:
        end = 12 + int.from_bytes(content[:8], "little")
        event = Event.FromString(content[12:end])
        for value in event.summary.value:
            yield (event.step, value.tag), value.simple_value
        content = content[end + 4 :]
