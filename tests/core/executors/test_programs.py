"""Tests the programs of a step that is run in parts."""

import jax
import pytest

from pipejax._core.executors._programs import programs_of
from pipejax._core.message import Reduced
from pipejax._core.step import common_of

from .digits import Appending, batch_of, config_of, start


def arguments(programs, config):
    """Returns the arguments of an update of the state before the first step."""
    state = start(config)
    in_flight = state.in_flight
    message, computed = programs.compute(common_of(state), in_flight, batch_of(3))
    reduced = jax.eval_shape(lambda: Reduced.of(message, True))
    zeros = jax.tree.map(lambda x: jax.numpy.zeros(x.shape, x.dtype), reduced)
    return common_of(state), computed, zeros, None, in_flight.filled


@pytest.mark.parametrize("own", [None, "compute", "apply"])
def test_programs_without_own_collectives_send_nothing(own):
    config = config_of(Appending(own))
    programs = programs_of(config, config.mesh)
    state, in_flight = start(config), start(config).in_flight
    compute = programs.compute.lower(common_of(state), in_flight, batch_of(3)).as_text()
    update = programs.update.lower(*arguments(programs, config)).as_text()
    assert ("all_reduce" in compute, "all_reduce" in update) == (
        own == "compute",
        own == "apply",
    )


@pytest.mark.parametrize("donate", [False, True])
def test_donating_update_overwrites_the_state_alone(donate):
    config = config_of(Appending(), donate=donate)
    programs = programs_of(config, config.mesh)
    state, *others = arguments(programs, config)
    programs.update(state, *others)
    assert state.trainable.params.is_deleted() == donate
    assert not any(x.is_deleted() for x in jax.tree.leaves(others))
