"""Tests a step in one program: the order of messages, donation, and waiting."""

import jax
import numpy as np
import pytest

from pipejax._core.executors import Fused, _turns
from pipejax._core.message import count

from .digits import Appending, batch_of, config_of, number_of, start


@pytest.mark.parametrize(
    ("width", "numbers"),
    [(1, [1, 12, 123, 1234]), (2, [0, 1, 12, 123]), (3, [0, 0, 1, 12])],
)
def test_fused_step_applies_every_message_once_in_order(width, numbers):
    """Step t + K - 1 appends digit t, and the drain appends the remaining digits."""
    work = Appending()
    config = config_of(work, width=width, devices=4)
    fused, found, arrived = Fused(config, "asked for"), [], []
    state = start(config)
    for digit in (1, 2, 3, 4):
        state, info, _ = fused.step(state, batch_of(digit, 4))
        found.append(number_of(state))
        arrived.append(bool(info))
    assert found == numbers
    assert arrived == [t >= width - 1 for t in range(4)]
    assert count(state.in_flight) == width - 1
    state, infos, _ = fused.drain(state)
    assert number_of(state) == 1234
    assert list(map(bool, infos)) == [True] * (width - 1)
    assert count(state.in_flight) == 0
    # One program serves all steps, and another one the drain, which computes no
    # gradient.
    assert work.traced == ["compute", "apply"] + ["apply"] * (width - 1)


@pytest.mark.parametrize("donate", [False, True])
def test_fused_step_donates_only_state_and_oldest_message(donate):
    """Neither the messages that stay in the queue nor the batch are donated."""
    config = config_of(Appending(), width=3, donate=donate)
    lowered = Fused(config, "asked for").lower(start(config), batch_of(1))
    (state, leaving, staying, batch), _ = lowered.args_info
    assert donated(state) == donated(leaving) == {donate}
    assert donated(staying) == donated(batch) == {False}


def donated(tree):
    return {leaf.donated for leaf in jax.tree.leaves(tree)}


def test_fused_step_hands_on_waiting_messages_without_a_copy():
    config = config_of(Appending(), width=4)
    fused = Fused(config, "asked for")
    state = start(config)
    for digit in (1, 2, 3):
        before = state.in_flight
        state, *_ = fused.step(state, batch_of(digit))
    after = state.in_flight
    for old, new in zip(before.pending[1:], after.pending[:-1], strict=True):
        assert new.gradients["digit"] is old.gradients["digit"]
    newest = np.asarray(after.pending[-1].gradients["digit"])
    np.testing.assert_array_equal(newest, batch_of(3).batch)


@pytest.mark.parametrize(("devices", "waits"), [(1, False), (2, True)])
def test_fused_step_waits_for_the_previous_on_several_cpus(monkeypatch, devices, waits):
    """A step and a drain wait for the step before, except inside a traced program.

    The devices share threads. Two programs in flight could each hold some of them.
    """
    config = config_of(Appending(), devices=devices)
    fused, turns = Fused(config, "asked for"), []

    def beside(results):
        turns.append("ran")
        jax.block_until_ready(results)

    monkeypatch.setattr(_turns, "join", lambda: turns.append("waited"))
    monkeypatch.setattr(_turns, "beside", beside)
    state = start(config)
    for digit in (1, 2):
        state, *_ = fused.step(state, batch_of(digit, devices))
    fused.drain(state)
    assert turns == ["waited", "ran"] * 3 * waits
    turns.clear()
    after, *_ = jax.jit(fused.step)(state, batch_of(3, devices))
    assert number_of(after) == 12
    assert turns == []
