"""Tests counts in closed form against the transfers that collectives declare."""

import math

import jax
import pytest
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax import codecs, collectives, timing
from pipejax._internal.mesh import on_mesh
from pipejax.collectives import Layout
from pipejax.timing import COST_MODELS, Counts

from ..grid import thinned

CODECS = {"int8": codecs.int8(), "top_k": codecs.error_feedback(codecs.top_k(0.1))}


PAIRS = [(a, c) for a in COST_MODELS for c in (None, *CODECS) if a != "psum" or not c]


def declared(algorithm, codec, p, n, shapes=None):
    """Returns the transfers that the collective of that name declares."""
    make, found = getattr(collectives, algorithm), []
    all_reduce = make() if codec is None else make(codec)

    layout = Layout.of_shapes(shapes or ((n,),))

    def local(arrays):
        stages = all_reduce(layout, "data")
        found.extend(stages.transfers)
        return collectives.run(stages, collectives.Summands(arrays))[0]

    mapped = on_mesh(local, pj.data_mesh(p), P(), P())
    jax.eval_shape(mapped, layout.coded)
    return found


@pytest.mark.parametrize(
    ("algorithm", "codec", "p", "n"),
    thinned(
        (*pair, p, n)
        for pair in PAIRS
        for p in (1, 2, 3, 4, 5, 7, 8)
        for n in (1, 1000)
    ),
)
def test_counts_equal_the_declared_transfers(algorithm, codec, p, n):
    chosen = CODECS.get(codec)
    counts = COST_MODELS[algorithm](p, n, chosen)
    sent = declared(algorithm, chosen, p, n)
    if algorithm == "psum":  # the backend does not declare how it cuts
        assert math.isclose(counts.wire, sum(x.wire_bytes for x in sent))
    else:
        assert counts.wire == sum(x.wire_bytes for x in sent)
    if p > 1:
        assert counts.collectives == len(sent)
    else:
        assert counts.messages == counts.collectives == counts.wire == 0


def test_psum_of_a_linear_codec_counts_two_rounds():
    """PowerSGD of rank r sends `r (rows + columns)` floats a matrix, in two rounds."""
    codec = codecs.power_sgd(2, jax.random.key(0)).of(((64, 32),))
    counts = COST_MODELS["psum"](4, 64 * 32, codec)
    assert counts.collectives == 2
    assert counts.messages == 12
    assert counts.wire == 2 * 3 / 4 * 4 * 2 * (64 + 32)
    # Both rounds read all elements only once, as the timing of encoding assumes.
    assert counts.encoded == counts.decoded == 4 * 64 * 32


@pytest.mark.parametrize("algorithm", COST_MODELS)
def test_power_sgd_is_compatible_only_with_whole_leaves(algorithm):
    """The collectives refuse the same algorithms."""
    codec = codecs.error_feedback(codecs.power_sgd(1, jax.random.key(0)))
    shapes, n = ((6, 8), (5,)), 53
    if timing.compatible(algorithm, codec):
        counts = COST_MODELS[algorithm](4, n, codec.of(shapes))
        sent = declared(algorithm, codec, 4, n, shapes)
        assert math.isclose(counts.wire, sum(x.wire_bytes for x in sent))
    else:
        with pytest.raises(ValueError, match="`power_sgd` must "):
            declared(algorithm, codec, 4, n, shapes)
    assert not timing.compatible(algorithm, codec, levels=True)


def test_counts_of_a_ring_equal_numbers_by_hand():
    """3 devices send 10 elements in blocks of 8: a piece as above, 2 hops each half."""
    assert COST_MODELS["ring"](3, 10, codecs.int8(8)) == Counts(
        messages=4,
        wire=4 * 12,
        shift=4 * 12,
        summed=2 * 32,
        encoded=3 * 32,  # each hop of the first half, and the sum
        decoded=5 * 32,  # the payloads of all hops, and all pieces
        collectives=4,
    )


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 7, 8, 64])
@pytest.mark.parametrize("algorithm", COST_MODELS)
def test_work_equals_the_closed_forms_by_hand(algorithm, p):
    """A device encodes, decodes and adds so many pieces of 8 elements."""
    q = 1 << (p.bit_length() - 1)  # the largest power of two up to p
    folds, levels = q * (p > q), (p - 1).bit_length()
    # For each algorithm the pieces of the vector, and those encoded, decoded, added.
    wanted = {
        "ring": (p, p, 2 * p - 1, p - 1),
        "two_shot": (p, p + 1, 2 * p, p - 1),
        "halving_doubling": (q, q + folds, 2 * q - 1 + folds, q - 1 + folds),
        "tree": (1, levels + 1, levels + 1, levels),
        "parameter_server": (1, 2, p + 1, p - 1),
        "psum": (p, 0, 0, p - 1),
    }
    pieces, encoded, decoded, summed = wanted[algorithm]
    codec = None if algorithm == "psum" else codecs.int8(8)
    counts = COST_MODELS[algorithm](p, 8 * pieces, codec)
    found = counts.encoded, counts.decoded, counts.summed
    assert found == (32 * encoded, 32 * decoded, 32 * summed)
