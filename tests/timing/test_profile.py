"""All-reduces taken apart: which link is what, and what the parts are."""

import jax
import pytest
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax import codecs, collectives, timing
from pipejax.collectives import Layout
from pipejax.mesh import on_mesh
from pipejax.timing._profile import phases

INT8 = codecs.int8()


def found(all_reduce, p=4):
    """The phases of its links, of p devices."""
    seen = []

    def local():
        stages = all_reduce(Layout.of_shapes(((1000,),)), "data")
        seen.extend(phases(stages))

    jax.eval_shape(on_mesh(local, pj.data_mesh(p), (), P()))
    return seen


def test_phases_of_psum():
    """Arrays put together into a vector, and taken apart again."""
    assert found(collectives.psum()) == ["encode", "first", "decode"]


def test_phases_of_two_shot():
    between = ["reduction", "encode"]  # decoded and added, encoded again
    halves = ["encode", "encode", "first", *between, "second", "decode", "decode"]
    assert found(collectives.two_shot(INT8)) == halves


@pytest.mark.parametrize("algorithm", ["ring", "halving_doubling", "tree"])
@pytest.mark.parametrize("codec", [None, INT8])
def test_either_half_has_as_many_exchanges(algorithm, codec):
    p = 4
    seen = found(getattr(collectives, algorithm)(codec), p)
    hops = p - 1 if algorithm == "ring" else 2
    assert seen.count("first") == seen.count("second") == hops
    # Every hop of the first half encodes, and the owner or the root once more.
    encoded = [i for i, phase in enumerate(seen) if phase == "encode"]
    assert len([i for i in encoded if i > seen.index("first")]) == hops
    assert seen[0] == "encode"
    assert seen[-1] == "decode"


def test_phases_of_a_linear_codec():
    """Two rounds: P is the first exchange, Q the second."""
    codec = codecs.error_feedback(codecs.power_sgd(1, jax.random.key(0)))
    seen = found(collectives.psum(codec))
    assert [p for p in seen if p != "reduction"] == [
        *("encode", "encode", "first", "encode", "second", "decode"),
    ]


def test_a_profile():
    cases = {
        "two-shot": timing.Case(collectives.two_shot(INT8), 2**16),
        "psum": timing.Case(collectives.psum(), 2**16),
    }
    profiles = timing.profile(pj.data_mesh(4), cases, rounds=2)
    assert list(profiles) == list(cases)
    for each in profiles.values():
        assert min(each) >= 0
        assert each.total == pytest.approx(sum(each))
        assert each.launch > 0
    assert profiles["psum"].reduction == profiles["psum"].second == 0


def test_one_device_exchanges_nothing():
    with pytest.raises(ValueError, match="`mesh` must have several devices, got one"):
        timing.profile(pj.data_mesh(1), {}, rounds=1)
