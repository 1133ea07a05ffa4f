"""Tests which part of a checkpoint a train step reads."""

import jax
import pytest

from pipejax.checkpoint._meta import meta_of
from pipejax.checkpoint._pipeline_form import CODECS, MEAN, QUEUE, wanted_of_pipeline

from .helpers import feedback, init, train_step


def wanted(train, state, other=None):
    """Returns what `other` reads of a checkpoint of `state`."""
    other = other or train
    like = jax.eval_shape(lambda: init(other))
    return wanted_of_pipeline(other, like, "folder", meta_of(state, 3, {}, {}))


@pytest.fixture(scope="module")
def filled():
    train = feedback(2)
    state = init(train)
    filled = jax.device_put(jax.numpy.ones(2, "int32"), state.in_flight.filled.sharding)
    return train, state._replace(in_flight=state.in_flight._replace(filled=filled))


def test_everything_is_read_on_the_same_devices(filled):
    found = wanted(*filled)
    assert (found.before.devices, found.anew) == (2, ())
    assert found.numbers == {"calls": 0}


def test_empty_queue_is_not_read(filled):
    train, _ = filled
    assert wanted(train, init(train)).anew == (QUEUE,)


def test_other_devices_read_no_codec_states(filled):
    found = wanted(*filled, feedback(4))
    assert CODECS in found.anew
    assert MEAN not in found.anew
    message = found.form.in_flight.pending[0]
    assert message.gradients["bias"].shape == (2 * 7,)
    assert message.gradients["bias"].sharding.is_fully_replicated


def test_checkpoint_of_another_width_is_not_read():
    train = train_step(2)
    with pytest.raises(ValueError, match="`train` must have width=2"):
        wanted(train, init(train), train_step(2, width=3))
