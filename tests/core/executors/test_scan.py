"""Tests that the pieces of a scan that writes digits write the same number in turn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pipejax._core.executors._scan import scan_operation

BASE, ZERO = np.int32([[10]]), np.int32([[0]])
DIGITS = np.arange(1, 6, dtype=np.int32).reshape(5, 1, 1)
# The final number, and the number after each iteration at the place of its digit.
WRITTEN = {
    False: [[12345], [1, 12, 123, 1234, 12345]],
    True: [[54321], [54321, 5432, 543, 54, 5]],
}


def writing(reverse):
    """Returns a function that appends digits to a number one by one."""

    def write(base, number, digits):
        def append(number, digit):
            number = number @ base + digit
            return number, number

        return lax.scan(append, number, digits, reverse=reverse)

    return write


def scan_of(function, *args):
    """Returns the scan of a function as an operation, and the names of the arguments.

    The names are the variables of the traced program.
    """
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    (scan,) = jaxpr.eqns
    operation = scan_operation(scan, tuple(scan.invars), tuple(scan.outvars))
    return operation, jaxpr.invars


def results(operations, names, args, writes):
    """Runs the operations in turn, and returns the values under the names `writes`."""

    def run(*args):
        values = dict(zip(names, args, strict=True))
        for operation in operations:
            outputs = operation.run(*(values[name] for name in operation.reads))
            values.update(zip(operation.writes, outputs, strict=True))
        return [values[name] for name in writes]

    return [np.ravel(x).tolist() for x in jax.jit(run)(*args)]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("fraction", "first"), [(0.0, 1), (0.4, 2), (0.6, 3), (1.0, 4)]
)
def test_halves_of_a_scan_have_their_flops_and_results(fraction, first, reverse):
    """Each iteration has 2 FLOPs. Neither half is empty."""
    args = BASE, ZERO, DIGITS
    scan, names = scan_of(writing(reverse), *args)
    assert scan.flops == 10
    halves = scan.halves(fraction)
    assert [half.flops for half in halves] == [2 * first, 10 - 2 * first]
    assert results(halves, names, args, scan.writes) == WRITTEN[reverse]


@pytest.mark.parametrize("reverse", [False, True])
def test_halves_can_be_cut_down_to_single_iterations(reverse):
    args = BASE, ZERO, DIGITS
    scan, names = scan_of(writing(reverse), *args)
    whole = results([scan], names, args, scan.writes)
    pieces = [scan]
    while any(piece.halves for piece in pieces):
        pieces = [
            half
            for piece in pieces
            for half in (piece.halves(0.5) if piece.halves else [piece])
        ]
    assert [piece.flops for piece in pieces] == [2] * 5
    found = results(pieces, names, args, scan.writes)
    assert found == whole == WRITTEN[reverse]


def test_scan_without_arrays_is_cut_in_halves():
    """Six doublings are cut into two and four."""

    def doubled(number):
        return lax.scan(lambda x, _: (x + x, None), number, None, length=6)[0]

    args = (jnp.int32([3]),)
    scan, names = scan_of(doubled, *args)
    halves = scan.halves(1 / 3)
    (two,) = results(halves[:1], names, args, halves[0].writes)
    assert two == [3 * 2**2]
    (six,) = results(halves, names, args, scan.writes)
    assert six == [3 * 2**6]


def test_scan_of_length_zero_has_no_work_and_is_not_cut():
    args = BASE, ZERO + 7, DIGITS[:0]
    scan, names = scan_of(writing(False), *args)
    assert (scan.flops, scan.halves) == (0, None)
    assert results([scan], names, args, scan.writes) == [[7], []]
