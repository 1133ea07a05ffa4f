"""Tests which checkpoint is restored if some are damaged."""

import logging

import pytest

from pipejax import checkpoint

from ..helpers import assert_bits_equal, batches
from .helpers import entries, host, init, run


@pytest.fixture
def folder(tmp_path, train):
    """A folder with checkpoints of steps 0, 1 and 2, and their states by step."""
    states, state = {}, init(train)
    with checkpoint.manager(tmp_path / "run", keep=None) as manager:
        for step in range(3):
            checkpoint.save(manager, state, {"saved": step})
            states[step] = host(state)
            state = run(train, state, batches(1))
    return tmp_path / "run", states


def damage(folder, step):
    (folder / str(step) / "extras" / "metadata").write_text('{"saved": 7}')


def restored(folder, train, like, step=None):
    with checkpoint.manager(folder, keep=None) as manager:
        return checkpoint.restore(manager, train, like, step)


def test_newest_whole_checkpoint_is_restored_and_damaged_are_moved(
    folder, train, like, caplog
):
    """The damaged ones are named and moved aside, so that they can be saved again."""
    path, states = folder
    damage(path, 1)
    damage(path, 2)
    with caplog.at_level(logging.WARNING, logger="pipejax"):
        found = restored(path, train, like)
    assert found.extras == {"saved": 0}
    assert_bits_equal(host(found.state), states[0])
    for step in (1, 2):
        says = f"step {step} in {path} is damaged: `extras` are not what was saved"
        assert says in caplog.text
    assert entries(path) == ["0", "damaged-1", "damaged-2"]
    with checkpoint.manager(path, keep=None) as manager:
        checkpoint.save(manager, run(train, found.state, batches(1)), {"saved": 1})
    assert restored(path, train, like).extras == {"saved": 1}
    damage(path, 1)
    assert restored(path, train, like).extras == {"saved": 0}
    assert (path / "damaged-1-2").exists()


def test_damaged_requested_step_is_never_replaced_by_another(folder, train, like):
    path, states = folder
    damage(path, 2)
    rule = r"whole, got damage in .*step 2: `extras` are not .* Restore another step\."
    with pytest.raises(ValueError, match=rule):
        restored(path, train, like, 2)
    assert_bits_equal(host(restored(path, train, like, 1).state), states[1])
    assert entries(path) == ["0", "1", "2"]


def test_damaged_checkpoints_stay_if_no_checkpoint_is_whole(folder, train, like):
    path, _ = folder
    for step in range(3):
        damage(path, step)
    rule = "step 2: `extras` .*; step 1: .*; step 0: .*Restore a copy of the folder"
    with pytest.raises(ValueError, match=rule):
        restored(path, train, like)
    assert entries(path) == ["0", "1", "2"]


def test_unreadable_storage_is_not_taken_for_damage(folder, train, like, monkeypatch):
    path, _ = folder
    monkeypatch.setattr(
        "pipejax.checkpoint._read.read",
        lambda path: (_ for _ in ()).throw(OSError(5, "Input/output error")),
    )
    with pytest.raises(OSError, match=r"step 2 in .* cannot be read: OSError: .*when"):
        restored(path, train, like)
    assert entries(path) == ["0", "1", "2"]


def test_read_only_manager_moves_no_damaged_checkpoint(folder, train, like):
    """The folder may be that of a running job."""
    path, states = folder
    damage(path, 2)
    with checkpoint.manager(path, read_only=True) as manager:
        found = checkpoint.restore(manager, train, like)
    assert_bits_equal(host(found.state), states[1])
    assert entries(path) == ["0", "1", "2"]
