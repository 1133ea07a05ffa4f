"""Tests that each process passes its own part of a batch."""

import numpy as np
import pytest

import pipejax as pj

from ..helpers import assert_bits_equal
from .refusals import BATCH, make, refused


@pytest.mark.parametrize(
    "part",
    [
        {"x": np.ones((3, 2))},
        {"x": np.ones(4), "y": np.ones(2)},
        np.ones(()),
        np.ones((0, 2)),
        {},
    ],
)
def test_part_that_does_not_divide(part):
    with refused("`local` must hold arrays with one common .* of its 2 shares"):
        make().batch(part)


@pytest.mark.parametrize("own", [-1, 2.0, None])
def test_number_of_batches(own):
    with refused("`own` must be an integer of at least 0, got"):
        make().fewest_batches(own)


def test_a_batch_on_one_process_is_what_it_was():
    train = make()
    assert_bits_equal(train.batch(BATCH), BATCH)
    assert train.fewest_batches(3) == 3


def test_devices_that_share_no_data_need_no_share_of_their_own():
    """On a mesh with a second axis, four devices have two shares."""
    mesh = pj.data_mesh(4, axis_name=("data", "model"), hosts=2)
    part = np.arange(6.0)
    made = make(mesh=mesh).batch(part)
    np.testing.assert_array_equal(made, part)
    shares = {tuple(np.asarray(x.data)) for x in made.addressable_shards}
    assert shares == {(0, 1, 2), (3, 4, 5)}
