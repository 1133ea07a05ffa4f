"""Tests the queue of messages against a Python list."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipejax._core.message import (
    Message,
    at_width_1,
    count,
    emptied,
    empty,
    shift,
    valid_in_drain,
    valid_in_queue,
    valid_in_step,
    width_of,
)


def message(value):
    return Message({"w": jnp.full((2, 3), value), "b": jnp.full(1, value, jnp.int32)})


def values(in_flight):
    return [float(m.gradients["w"][0, 0]) for m in in_flight.pending]


def flags(found):
    return list(map(bool, found))


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_message_leaves_the_queue_width_minus_1_steps_later(width):
    """Step t takes the message of step t - (K-1); zeros at the start do not count."""
    queue, twin = empty(message(0.0), width, {}), [0.0] * (width - 1)
    for t in range(6):
        assert values(queue) == twin
        real = [t - age >= 0 for age in range(width - 1, 0, -1)]
        assert flags(valid_in_queue(queue)) == real
        for age in range(max(1, width - 1)):
            found = valid_in_step(queue.filled, width - 1, age)
            assert bool(found.message) == (t + age >= width - 1)
            later = [t + age + 1 - back >= 0 for back in range(width - 1, 0, -1)]
            assert flags(found.behind) == later
        for age in range(width - 1):
            found = valid_in_drain(queue, age)
            assert bool(found.message) == real[age]
            assert flags(found.behind) == real[age + 1 :]
        assert count(queue) == sum(real)
        queue = shift(queue, message(t + 1.0), {})
        twin = [*twin, t + 1.0][1:]
    assert width_of(queue) == width


def test_empty_queue_has_the_form_of_the_messages():
    like = jax.eval_shape(lambda: message(1.0))
    queue = empty(like, 3, {"site": jnp.ones(2)})
    assert len(queue.pending) == 2
    for tree in queue.pending:
        assert jax.tree.map(lambda x: (x.shape, x.dtype), tree) == jax.tree.map(
            lambda x: (x.shape, x.dtype), like
        )
        assert not any(np.any(x) for x in jax.tree.leaves(tree))
    np.testing.assert_array_equal(queue.codec_states["site"], [1, 1])


def test_drained_queue_keeps_only_codec_states():
    queue = empty(message(0.0), 2, {"site": jnp.ones(2)})
    queue = shift(queue, message(5.0), {"site": jnp.full(2, 7.0)})
    after = emptied(queue, {"site": jnp.full(2, 9.0)})
    assert count(after) == 0
    assert values(after) == [0]
    np.testing.assert_array_equal(after.codec_states["site"], [9, 9])


def test_queue_of_a_synchronous_step_is_empty():
    """The given queue is empty, and shares the codecs' states."""
    queue = empty(message(0.0), 3, {"site": jnp.ones(2)})
    given = at_width_1(queue)
    assert width_of(given) == 1
    assert given.codec_states is queue.codec_states
