"""Tests what is sent: the kinds, counts, bytes and dtypes of collectives."""

import collections
import math
import re

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax._internal.mesh import on_mesh

from ..collectives.cases import GRID, case, every, program, summed

EACH = every(GRID)


# The counts of each kind of collective on p devices. `bit_length` is the logarithm.
COUNTS = {
    "psum": lambda p: {"all-reduce": 1},
    "ring": lambda p: {"collective-permute": 2 * (p - 1)},
    "two_shot": lambda p: {"all-to-all": 1, "all-gather": 1},
    "halving_doubling": lambda p: {
        "collective-permute": 2 * (p.bit_length() - 1) + 2 * (p & (p - 1) > 0)
    },
    "tree": lambda p: {"collective-permute": 2 * (p - 1).bit_length()},
    "parameter_server": lambda p: {"collective-permute": 2 * (p - 1)},
    # One of each runs inside hosts, and one between hosts.
    "hierarchical": lambda p: {"all-to-all": 2, "all-gather": 2},
}
# JAX omits an all_to_all of one device.
DEVICES = {"two_shot": (2, 3, 4, 5, 7, 8), "hierarchical": (4, 6, 8)}
COUNTED = [(a, p) for a in COUNTS for p in DEVICES.get(a, (1, 2, 3, 4, 5, 7, 8))]


def in_text(text):
    """Returns the collectives of a lowered program, by XLA's names."""
    names = re.findall(
        r"stablehlo\.(all_reduce|all_gather|all_to_all|reduce_scatter"
        r"|collective_permute|collective_broadcast|send|recv)\b",
        text,
    )
    return [name.replace("_", "-") for name in names]


@pytest.mark.parametrize(("algorithm", "devices"), COUNTED)
def test_lowered_text_has_the_known_number_of_collectives(algorithm, devices):
    each, found = case(algorithm, None, devices, 8), []

    def local(row):
        stages = each.all_reduce(each.layout, each.axis)
        found.extend(stages.transfers)
        assert len(stages.stages) == len(stages.transfers)
        return summed(each.layout, stages, row[0])[0][None]

    own = P(each.axis)
    mapped = jax.jit(on_mesh(local, each.mesh, own, own))
    text = mapped.lower(np.zeros((devices, 8), np.float32)).as_text()
    wanted = {k: n for k, n in COUNTS[algorithm](devices).items() if n}
    assert collections.Counter(in_text(text)) == wanted
    assert in_text(text) == [transfer.kind for transfer in found]


@EACH
def test_codec_changes_no_count_except_power_sgd(each):
    """Only power_sgd changes the count, because it has two rounds."""
    wanted = COUNTS[each.algorithm](each.devices)
    if (each.algorithm, each.codec) == ("psum", "power_sgd+feedback"):
        wanted = {"all-reduce": 2}
    assert collections.Counter(in_text(program(each).text)) == wanted
    assert [x.kind for x in program(each).transfers] == in_text(program(each).text)


@EACH
def test_compiled_program_sends_the_transfers_of_the_stages(each):
    found = pj.overlap.inspect(program(each).step).collectives
    sent = [(c.kind, c.bytes, c.wire_bytes) for c in found]
    said = [(x.kind, x.bytes, x.wire_bytes) for x in program(each).transfers]
    assert collections.Counter(sent) == collections.Counter(said)
    assert all(c.times == 1 for c in found)


@EACH
def test_compressed_payload_travels_as_unsigned_integers(each):
    """No backend widens unsigned integers, as XLA:CPU widens bfloat16."""
    found = pj.overlap.inspect(program(each).step).collectives
    dtypes = {dtype for c in found for dtype in c.dtypes}
    if each.algorithm == "psum":
        assert dtypes == {"f32"}  # the backend adds floats
    else:
        assert dtypes <= {"u8", "u16", "u32"}


def total(each):
    return sum(x.wire_bytes for x in program(each).transfers)


@pytest.mark.parametrize("algorithm", ["ring", "two_shot", "halving_doubling"])
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_bytes_equal_the_minimum_of_an_all_reduce(algorithm, devices):
    """Devices send `2 (p-1)/p` of the 4-byte elements, as `psum` does at best."""
    each = case(algorithm, None, devices, 1024)
    assert total(each) == 2 * (devices - 1) / devices * 4 * 1024
    assert total(each) == total(case("psum", None, devices, 1024))


def test_int8_sends_a_quarter_of_the_bytes():
    """int8 sends 1 + 4/256 bytes for an element, instead of 4."""
    plain, coded = (case("two_shot", c, 4, 1024) for c in (None, "int8"))
    assert math.isclose(total(coded) / total(plain), (1 + 4 / 256) / 4)
