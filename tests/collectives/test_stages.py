"""Tests links put together by hand: where stages begin, and how states are renamed."""

import jax.numpy as jnp
import numpy as np
import pytest

from pipejax.collectives import Stages, Transfer, run
from pipejax.collectives._stages import Local, Sent, chained, local, renamed


def collective(name, size):
    """Makes a collective that appends its name to the value."""
    transfer = Transfer("all-reduce", 2, size)
    return Stages((Sent(lambda value: [*value, name], (transfer,)),))


def appending(name):
    """Makes a local link that appends its name to the value and sends nothing."""
    return local(lambda value: [*value, name])


def counting(place):
    """Makes a local link that appends how often it has run, which is its state."""

    def count(value, states):
        times = states[place] + 1
        return [*value, times], {**states, place: times}

    return Stages((Local(count, encodes=True),), (lambda prefix: {place: 0},))


MIXED = (
    appending("a")
    + appending("b")
    + collective("B", 16)
    + collective("C", 32)
    + appending("c")
)


def test_each_stage_ends_with_its_collective():
    """Two local links and a collective, a collective alone, and the remaining link."""
    parts = [stage(([], {}))[0] for stage in (*MIXED.stages, MIXED.finish)]
    assert parts == [["a", "b", "B"], ["C"], ["c"]]
    assert [transfer.bytes for transfer in MIXED.transfers] == [16, 32]


def test_run_takes_the_stages_in_order():
    assert run(MIXED, [], {}) == (["a", "b", "B", "C", "c"], {})


def test_links_without_a_collective_form_the_finish():
    stages = appending("a")
    assert (stages.stages, stages.transfers) == ((), ())
    assert stages.finish(([], {})) == (["a"], {})


@pytest.mark.parametrize(("usable", "left"), [(True, [5, 0]), (False, [0, 0])])
def test_guarded_stages_take_no_infinite_state(usable, left):
    def replace(value, states):
        return value, {
            "lost": value,
            "calls": states["calls"] + 1,
            "kept": states["kept"],
        }

    stages = Stages((Local(replace, encodes=True),)) + collective("sent", 4)
    before = {"lost": jnp.zeros(2), "calls": jnp.int32(0), "kept": jnp.array(np.nan)}
    stages = stages.guarded(lambda: jnp.array(usable))
    _, states = stages.stages[0]((jnp.array([5, np.inf]), before))
    assert states["lost"].tolist() == left
    assert states["calls"] == usable
    assert np.isnan(states["kept"])


def test_states_begin_anew_or_continue_from_given_values():
    stages = counting("up") + collective("sent", 4) + counting("down")
    assert stages.init() == {"up": 0, "down": 0}
    value, states = run(stages, [])
    assert (value, states) == ([1, "sent", 1], {"up": 1, "down": 1})
    assert run(stages, [], states)[0] == [2, "sent", 2]


def test_renamed_stages_leave_other_states_alone():
    """Stages of one kind can stand side by side, as in a schedule."""
    one, other = (renamed(counting("up"), f"phase {i} ") for i in (0, 1))
    states = {"phase 0 up": 5, "phase 1 up": 7, "up": 9}
    assert (one + other).init() == {"phase 0 up": 0, "phase 1 up": 0}
    value, after = run(one, [], states)
    assert (value, after) == ([6], states | {"phase 0 up": 6})
    value, after = run(renamed(other, "outer "), [], {"outer phase 1 up": 1})
    assert (value, after) == ([2], {"outer phase 1 up": 2})


def test_renamed_links_keep_collectives_and_encoding():
    """Renaming keeps the collectives' objects, and whether links encode."""
    stages = counting("up") + collective("sent", 4)
    before, after = stages.links, renamed(stages, "inner ").links
    assert after[0].encodes
    assert after[1] is before[1]


@pytest.mark.parametrize("links", [(), (Local(lambda value, states: (value, states)),)])
def test_links_without_work_change_nothing(links):
    assert chained(links)(("value", {"up": 1})) == ("value", {"up": 1})
