"""Runs that keep snapshots, and are broken off."""

import contextlib

from pipejax import checkpoint
from pipejax.checkpoint._snapshots import _pace


class BrokenOffError(Exception):
    """Stands for a fault, after which the memory of a job stays."""


def every_step(monkeypatch):
    """Makes each call of `snapshot` copy."""
    monkeypatch.setattr(_pace, "FIRST", 1)
    monkeypatch.setattr(_pace, "steps_between", lambda *_: 1)


@contextlib.contextmanager
def broken_off(folder, memory, **settings):
    """Opens a manager whose content ends by an error, after the last snapshot."""
    with (
        contextlib.suppress(BrokenOffError),
        checkpoint.manager(folder, memory=memory, **settings) as manager,
    ):
        yield manager
        settled(manager)
        raise BrokenOffError


def settled(manager):
    """Waits until the last snapshot is complete."""
    manager.keeper.settle()


def run(manager, train, state, data, save_at=()):
    """Trains with a snapshot after each step, whose extras say the step."""
    for batch in data:
        state, _ = train.step(state, batch)
        step = int(state.local.step[0] if hasattr(state, "local") else state.step)
        settled(manager)
        checkpoint.snapshot(manager, state, {"step": step})
        if step in save_at:
            checkpoint.save(manager, state, {"step": step})
    return state
