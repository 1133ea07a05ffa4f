"""Tests the stages of a program for pieces: their order and what they send."""

import jax
import jax.numpy as jnp
import optax

from pipejax._core.partitioned import Devices, on_partitions, stages_of
from pipejax.collectives import Transfer

DEVICES = Devices({"data": 4})
ROWS = (("data",), ())
FORM = jax.ShapeDtypeStruct((8, 3), "float32")


def stages(function, count=1):
    program = on_partitions(function, [FORM] * count, [ROWS] * count, DEVICES)
    return stages_of(program, DEVICES)


def test_function_without_sums_has_no_stage():
    assert not stages(jnp.exp).stages


def test_sums_of_one_level_travel_together():
    found = stages(lambda x, y: x * x.sum() + y * y.sum(), 2)
    assert found.transfers == (Transfer("all-reduce", 4, 8),)


def test_sum_of_a_sum_has_its_own_stage():
    found = stages(lambda x: (x - x.mean()).std())
    assert len(found.stages) == 3
    assert {x.bytes for x in found.transfers} == {4}


def test_norm_sends_one_number_for_each_array():
    def clipped(x, y):
        clip = optax.clip_by_global_norm(1.0)
        return clip.update([x, y], clip.init(None))

    assert stages(clipped, 2).transfers == (Transfer("all-reduce", 4, 8),)
