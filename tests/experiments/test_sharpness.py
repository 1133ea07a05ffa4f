"""Tests the sharpness along a run, beside the losses of runs at other widths."""

import json

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pipejax as pj
from experiments.convergence import _runs, sharpness


def run(optimizer, rate, method, seed, loss):
    ends = {"test_loss": loss, "test_accuracy": 0.9}
    return _runs.key("digits", optimizer, rate, method, seed) | ends


def compared():
    """Returns runs of two optimizers at two rates, the first of which is tuned."""
    losses = {"K=1": 0.5, "K=2, plain": None, "K=2, predicted": 0.6}
    losses |= {"K=3, plain": None, "K=3, predicted": 0.7}
    return {
        "seeds": [0, 1],
        "factors": [1.0, 2.0],
        "runs": [
            run(optimizer, factor * rate, method, seed, loss and loss * factor)
            for optimizer, rate in (("momentum", 0.1), ("adamw", 0.001))
            for factor in (1, 2)
            for method, loss in losses.items()
            for seed in (0, 1)
        ],
    }


@pytest.mark.full
@pytest.mark.parametrize("factors", [(2.0,), (1.0, 2.0)])
def test_small_sharpness_run_writes_result_and_plot(tmp_path, factors):
    runs = tmp_path / "convergence.json"
    runs.write_text(json.dumps(compared()))
    found = sharpness.main(
        sharpness.Config(
            tasks=("digits",),
            factors=factors,
            seeds=(0,),
            steps=20,
            runs=runs,
            out=tmp_path / "sharpness.json",
            plot=tmp_path / "sharpness.png",
        )
    )
    assert [(run["optimizer"], run["rate"]) for run in found] == [
        *(("momentum", 0.1 * factor) for factor in factors),
        *(("adamw", 0.001 * factor) for factor in factors),
    ]
    for each in found:
        assert len(each["rate_times_sharpness"]) == len(sharpness.PLACES)
        assert all(product > 0 for product in each["rate_times_sharpness"])
    record = json.loads((tmp_path / "sharpness.json").read_text())
    assert record["runs"] == found
    assert (tmp_path / "sharpness.png").stat().st_size > 10_000


def test_rows_are_shares_of_the_limits_of_width_2_and_3():
    found = [
        _runs.key("digits", "momentum", 0.1, "K=1", seed)
        | {"rate_times_sharpness": [0.1, product, 9.0]}
        for seed, product in enumerate((0.4, 0.6))
    ]
    titles, row = sharpness.rows(found, compared())
    assert dict(zip(titles, row, strict=True)) == {
        "task": "digits",
        "optimizer": "momentum",
        "rate": "0.1",
        "rate x sharpness": "0.5",
        "of the limit at K=2": "0.50",  # the limit is 1
        "K=2, predicted": "+0.1000 ± 0.0000",
        "of the limit at K=3": "0.95",  # the limit is 1 / 1.9
        "K=3, predicted": "+0.2000 ± 0.0000",
    }
    assert sharpness.lost(compared(), ("digits", "momentum", 0.1), "K=2, plain") == (
        "diverged"
    )


def test_adamw_divides_by_the_root_of_its_second_moment():
    tx = optax.chain(optax.clip_by_global_norm(10.0), optax.adamw(1.0, weight_decay=0))
    params, gradient = jnp.array([1.0, 2.0]), jnp.array([0.5, -3.0])
    _, state = tx.update(gradient, tx.init(params), params)
    np.testing.assert_allclose(
        sharpness.divisor(state), np.abs(gradient), rtol=1e-5, atol=1e-7
    )
    assert sharpness.divisor(optax.sgd(0.1, 0.9).init(params)) is None


@pytest.mark.parametrize("optimizer", sharpness.LINEAR)
def test_linear_part_of_every_optimizer_has_a_limit(optimizer):
    assert np.isfinite(pj.stability.max_curvature(sharpness.LINEAR[optimizer], 2))
