"""Tests what devices agree on before a sum, and what codecs keep of weighted sums."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pipejax as pj
from pipejax import codecs, collectives
from pipejax._core.message import agreed_bytes, agreement
from pipejax._core.message._agreed import in_means
from pipejax.collectives import Local, Stages, Summands, run

from ...groups import batches, loss_fn, placed
from .example import message


def agreed(weights, bad=(0.0, 0.0), valid=True):
    """Returns what two devices agree on, one after the other."""

    def own(weight, bad):
        whole = message(1.0, None if weights is None else weight, bad)
        return agreement(whole, jnp.array(valid), "data")()

    given = jnp.zeros(2) if weights is None else jnp.float32(weights)
    found = jax.vmap(own, axis_name="data")(given, jnp.float32(bad))
    return found.usable.tolist(), found.mean_weight.tolist()


@pytest.mark.parametrize("weights", [None, (1, 3)])
def test_sum_is_usable_if_valid_and_finite_on_all_devices(weights):
    mean = [1.0 if weights is None else 2.0] * 2
    assert agreed(weights) == ([True] * 2, mean)
    assert agreed(weights, valid=False) == ([False] * 2, mean)
    assert agreed(weights, bad=(0, np.nan)) == ([False] * 2, mean)
    assert agreed(weights, bad=(np.inf, 0)) == ([False] * 2, mean)


def test_sum_without_any_weight_is_not_usable():
    assert agreed((0, 0)) == ([False] * 2, [1.0] * 2)
    assert agreed((0, 5)) == ([True] * 2, [2.5] * 2)


def test_devices_of_a_group_agree_by_a_maximum():
    """XLA would merge a sum with sums of the compute, such as that of the loss."""
    mesh = pj.data_mesh(4, axis_name=("host", "fsdp"), hosts=2)
    train = pj.make_train_step(
        loss_fn,
        optax.sgd(0.1),
        mesh=mesh,
        axis_name="host",
        weight_prediction=False,
        all_reduce=collectives.two_shot(codecs.error_feedback(codecs.int8(8))),
        executor="fused",
    )
    state, (batch,) = train.abstract_state(placed(mesh, "fsdp")), batches(1)
    text = train.lower(state, batch).as_text()
    found = re.findall(r"stablehlo.all_reduce.*?stablehlo.(add|max)", text, re.DOTALL)
    assert found == ["max", "max", "add"]
    sent = train.transfers(state, batch)
    assert [x.devices for x in sent if x.bytes == 4] == [2, 2]


def test_weights_travel_with_the_flag():
    assert agreed_bytes(8, weighted=False) == 4
    assert agreed_bytes(8, weighted=True) == 4 + 4 * 8


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_codecs_with_states_see_gradients_in_units_of_their_mean(dtype):
    def look(value, states):
        return value, {name: value.coded[0] for name in states}

    def passed(states, narrow):
        agree = agreement(message(1.0, 4.0), jnp.array(True), "data")
        stages = in_means(agree, Stages((Local(look),)), narrow=narrow)
        return run(stages, Summands((jnp.full(3, 8, dtype),), (jnp.ones(2),)), states)

    for states in ({}, {"residual": jnp.zeros(3)}):
        own = functools.partial(passed, states, narrow=False)
        after, seen = jax.vmap(own, axis_name="data", axis_size=2)()
        assert after.coded[0].dtype == dtype
        np.testing.assert_array_equal(after.coded[0], np.full((2, 3), 8, dtype))
        np.testing.assert_array_equal(after.exact[0], np.ones((2, 2)))
        assert [x.tolist() for x in seen.values()] == [[[2] * 3] * 2] * len(states)
