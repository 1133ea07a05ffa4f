"""Tests where a device takes its gradient against numbers found by hand."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pipejax as pj
from pipejax._core.message import InFlight, Message, Passengers
from pipejax._core.step._prediction import kinds, point

from ...helpers import loss_fn


@pytest.mark.parametrize("weight", [None, 4.0])
@pytest.mark.parametrize(
    ("filled", "wanted"),
    [
        (2, 10 - 4 / 2 - 2 / 2),
        (1, 10 - 2 / 2),  # only the newer gradient is real
        (0, 10),
    ],
)
def test_prediction_equals_numbers_by_hand(filled, wanted, weight):
    """w is 10, the learning rate 1/2; 4 and 2 are in flight."""
    train = pj.make_train_step(
        loss_fn,
        optax.sgd(0.5),
        mesh=pj.data_mesh(1),
        width=3,
        weight_prediction="own",
    )
    state = train.init(np.float32(10))
    passengers = Passengers.of(
        jnp.float32(0), None, None if weight is None else jnp.float32(weight)
    )
    in_flight = InFlight(
        # A gradient travels multiplied by its weight.
        pending=tuple(
            Message(jnp.float32([g * (weight or 1)]), None, passengers) for g in (4, 2)
        ),
        filled=jnp.array([filled]),
        codec_states={},
    )
    found = point(train.settings, kinds(train.settings), state, in_flight)
    assert float(found) == wanted
