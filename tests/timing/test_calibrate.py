"""Tests what calibration measures on this machine."""

import math

import jax
import numpy as np
import pytest

import pipejax as pj
from pipejax import codecs, timing
from pipejax.timing._calibrate import core_speeds
from pipejax.timing._stopwatch import Case, CompiledAllReduce


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


def test_hosts_with_several_devices_have_an_inner_link():
    mesh = pj.data_mesh(4, axis_name=("host", "device"), hosts=2)
    fit = timing.calibrate(mesh, sizes=(16, 4096), rounds=2)
    cluster = fit.cluster
    assert (cluster.hosts, cluster.devices) == (2, 2)
    assert cluster.inner.bandwidth > 0
    assert "inside a host, between 2 devices" in fit.speeds
    # Both devices of a host send at the same time.
    for sample in fit.samples:
        algorithm, n = sample.name.split()
        alone = timing.COST_MODELS[algorithm](2, int(n), None)
        assert sample.exchange.between.wire == 2 * alone.wire
        assert sample.exchange.between.summed == alone.summed


@pytest.mark.parametrize("hosts", [1, 4])
def test_exchange_is_timed_along_one_axis(hosts):
    """The devices at each place along the other axis have sums of their own."""
    mesh = pj.data_mesh(4, axis_name=("host", "device"), hosts=hosts)
    case = Case(pj.collectives.psum(), 8)
    summed = CompiledAllReduce(mesh, case, "device")
    total, _ = summed._step(summed.summands, summed.states)
    each = np.concatenate([np.ravel(x) for x in summed.summands.coded])
    groups = each.reshape(hosts, 4 // hosts, -1).sum(axis=1)
    found = np.concatenate([np.ravel(x) for x in total.coded])
    np.testing.assert_allclose(found, groups.ravel(), rtol=1e-6)


def test_mesh_of_one_host_and_an_axis_of_hosts_is_refused():
    mesh = pj.data_mesh(4, axis_name=("host", "device"), hosts=1)
    with pytest.raises(ValueError, match=r"`mesh` must have one axis, or an axis of s"):
        timing.calibrate(mesh)


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
