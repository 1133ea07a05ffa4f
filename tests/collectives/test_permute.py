"""Tests permutes between devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax import codecs
from pipejax._internal.mesh import on_mesh
from pipejax.collectives import Layout, Transfer
from pipejax.collectives._permute import (
    among,
    append_received,
    hand_over,
    permute,
    send_and_add,
    twice,
)
from pipejax.collectives._sites import Cut, Parts
from pipejax.collectives._stages import run

DEVICES = 4
PAIRS = [(3, 0), (0, 2)]  # nothing is sent to devices 1 and 3
PAYLOADS = np.uint32([[10, 11], [20, 21], [30, 31], [40, 41]])


def on_devices(function):
    """Runs `function(axis, row)` on a device for each payload."""
    mapped = on_mesh(
        lambda rows: function("data", rows[0])[None],
        pj.data_mesh(DEVICES),
        P("data"),
        P("data"),
    )
    return np.asarray(jax.jit(mapped)(PAYLOADS))


def test_permute_gives_zeros_to_devices_without_a_sender():
    got = on_devices(lambda axis, row: run(permute(axis, PAIRS, 8), row, {})[0])
    np.testing.assert_array_equal(got, [[40, 41], [0, 0], [10, 11], [0, 0]])


def test_received_payload_is_appended_to_the_list():
    def exchange(axis, row):
        stage = append_received(axis, PAIRS, 8, position=0)
        return jnp.stack(run(stage, [row, 2 * row], {})[0])

    first, second, received = np.moveaxis(on_devices(exchange), 1, 0)
    np.testing.assert_array_equal(first, PAYLOADS)
    np.testing.assert_array_equal(second, 2 * PAYLOADS)
    np.testing.assert_array_equal(received, [[40, 41], [0, 0], [10, 11], [0, 0]])


def test_received_vector_is_added_to_the_own_one():
    """Devices 0 and 2 get the two elements of devices 3 and 0."""

    def exchange(axis, row):
        layout = Layout.of_shapes(((2,),))
        cut = Cut.of(layout, 1, 1)
        site = cut.site("up", codecs.check_codec(None), axis)
        own = Parts(row.astype(jnp.float32), jnp.zeros(0))
        stage = twice() + send_and_add(site, axis, PAIRS)
        return run(stage, own, {})[0].coded

    wanted = [[50, 52], [20, 21], [40, 42], [40, 41]]
    np.testing.assert_array_equal(on_devices(exchange), wanted)


def test_hand_over_keeps_own_values_without_a_sender():
    got = on_devices(lambda axis, row: run(hand_over(axis, PAIRS, 8), row, {})[0])
    np.testing.assert_array_equal(got, [[40, 41], [20, 21], [10, 11], [40, 41]])


@pytest.mark.parametrize("ranks", [[], [2], [0, 3]])
def test_membership_among_ranks_is_true_on_the_given_ranks(ranks):
    got = on_devices(lambda axis, row: among(axis, iter(ranks)))
    np.testing.assert_array_equal(got, [rank in ranks for rank in range(DEVICES)])


def test_permute_and_hand_over_declare_their_transfer():
    def exchange(axis, row):
        transfer = Transfer("collective-permute", DEVICES, 8)
        assert permute(axis, PAIRS, 8).transfers == (transfer,)
        assert hand_over(axis, PAIRS, 8).transfers == (transfer,)
        return row

    on_devices(exchange)
