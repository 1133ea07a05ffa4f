"""Makes train steps for input that they must refuse."""

import optax
import pytest

import pipejax as pj

from ..helpers import batches, loss_fn

TX = optax.adam(1e-2)
(BATCH,) = batches(1)


def make(loss=loss_fn, *, devices=2, **settings):
    """Makes a train step on `devices` devices."""
    settings = {"mesh": pj.data_mesh(devices)} | settings
    return pj.make_train_step(loss, settings.pop("tx", TX), **settings)


def refused(message):
    """Expects a ValueError with this message, a regular expression."""
    return pytest.raises(ValueError, match=message)
