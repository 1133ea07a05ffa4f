"""Tests what calibration measures on this machine."""

import math

import jax
import pytest

import pipejax as pj
from pipejax import codecs, timing
from pipejax.timing._calibrate import core_speeds


def test_calibration_measures_every_exchange_and_codec():
    """Every sample and the codec are measured once; times depend on the machine."""
    fit = timing.calibrate(
        pj.data_mesh(2), {"int8": codecs.int8()}, sizes=(16, 4096), rounds=2
    )
    assert fit.cluster.hosts == 2
    assert len(fit.samples) == 10
    assert {sample.elements for sample in fit.samples} == {16, 4096}
    assert all(sample.seconds > 0 for sample in fit.samples)
    assert 0 < fit.cluster.codec("int8").encode < math.inf
    assert 0 < fit.cluster.reduction < math.inf


def test_power_sgd_is_measured_on_matrices():
    """PowerSGD would send a vector uncompressed, in one round."""
    codec = codecs.error_feedback(codecs.power_sgd(1, jax.random.key(0)))
    asked = []

    class Watched(codecs.Codec):
        def of(self, shapes):
            asked.append(shapes)
            return codec.of(shapes)

        size = encode = decode = bound = None

    _, speeds = core_speeds(pj.data_mesh(2), {"it": Watched()}, 2**11, 1)
    assert asked == [((2, 1024),)]
    assert 0 < speeds["it"].encode < math.inf


def test_calibration_on_one_device_is_refused():
    with pytest.raises(ValueError, match="`mesh` must have several devices, got one"):
        timing.calibrate(pj.data_mesh(1))
