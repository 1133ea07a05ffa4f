"""Tests the text's batches and its test set, and the learning rate."""

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import learning


@pytest.mark.full
def test_last_tenth_of_the_text_is_held_out(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("ab" * 900 + "cd" * 100)
    task = learning.characters(path, batch_size=8, steps=10)
    batch = next(task.batches(0))
    assert batch.shape == (8, 65)
    long = {"w": jnp.full(4, 3.0)}
    clipped, _ = task.clip.update(long, task.clip.init(long))
    assert jnp.linalg.norm(clipped["w"]) == pytest.approx(1.0)
    assert batch.max() == 1, "of four letters the last two are only in the last tenth"
    # From 1,800 on, there are windows that share only their ends.
    held_out = np.resize([2, 3], 200)[np.arange(0, 192, 64)[:, None] + np.arange(65)]
    params = task.init(0)
    loss = float(task.loss(params, held_out))
    assert task.test(params)["test_loss"] == pytest.approx(loss, rel=1e-5)


def test_missing_text_is_named_in_the_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="no text at"):
        learning.characters(tmp_path / "none.txt", batch_size=8, steps=10)


def test_learning_rate_rises_and_falls_to_zero():
    task = learning.Task(100, None, None, None, None)
    rates = [float(task.schedule(0.5)(step)) for step in (0, 10, 55, 100)]
    assert rates == pytest.approx([0, 0.5, 0.25, 0], abs=1e-6)
