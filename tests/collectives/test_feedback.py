"""Tests that residuals and sent values add up to the gradients."""

import jax
import numpy as np

from .cases import GRID, every, program, run
from .residuals import pieces

FED_BACK = [x for x in GRID if x.codec.endswith("+feedback") and x.hosts is None]


def cuts(each):
    if each.algorithm == "halving_doubling":
        return 1 << each.devices.bit_length() - 1
    return each.devices if each.algorithm in ("ring", "two_shot") else 1


def residuals(each, states):
    """Yields the residual of every device and place, as a vector of all elements."""
    p, n = cuts(each), each.layout.coded_size
    for place, state in states.items():
        leaves = jax.tree.leaves(state.residual)
        for device in range(each.devices):
            own = [np.asarray(leaf[device], np.float64) for leaf in leaves]
            if len(own) > 1:  # the codec works on leaves
                own = [np.concatenate([x.reshape(-1) for x in own])]
            rows = own[0].reshape(-1, own[0].shape[-1])
            whole = np.zeros((p, rows.shape[1]))
            for piece, row in zip(pieces(place, device)(p), rows, strict=True):
                if piece < p:  # in halving-doubling, the last devices own no piece
                    whole[piece] = row
            yield whole.reshape(-1)[:n]


@every(FED_BACK)
def test_residuals_hold_everything_missing_from_the_sums(each):
    """The sum of gradients = result + sum over places of (residual after - before).

    At each place float32 rounds at most three times: in x + e, in the difference to the
    decoded value, and in the sum with the other devices. No rounded number exceeds s,
    the sum of all absolute values added here, and an element is encoded at no more than
    p + 1 places.
    """
    before, n = program(each).init, each.layout.coded_size
    for seed in range(3):
        vectors = each.vectors(seed)
        sums, after = run(each, vectors, before)
        given = np.asarray(vectors[:, :n], np.float64)
        was, now = (list(residuals(each, states)) for states in (before, after))
        left = sums[0, :n] + sum(now) - sum(was)
        s = sum(map(np.abs, [*given, *now, *was]))
        bound = 3 * (each.devices + 1) * 2.0**-24 * s
        assert (np.abs(left - given.sum(axis=0)) <= bound).all()
        before = after
    assert any(np.abs(x).max() > 0 for x in now)


@every(FED_BACK)
def test_mean_of_many_results_is_closer_than_one_result(each):
    """The mean of many results of one gradient is closer to it than a single result."""
    vectors, states, steps = each.vectors(), program(each).init, 20
    n, mean = each.layout.coded_size, 0
    for _ in range(steps):
        sums, states = run(each, vectors, states)
        mean = mean + sums[0, :n] / steps
    once, _ = run(each, vectors)
    exact = vectors[:, :n].sum(axis=0)
    assert np.abs(mean - exact).mean() < np.abs(once[0, :n] - exact).mean()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(states))
