"""Tests a microbatch's share of a message: everything times the weight."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax._core.message import Passengers
from pipejax._core.step._contribution import combined, contribution
from pipejax._core.step._loss import Returned

from ...helpers import assert_bits_equal
from ...train_step.refusals import refused


def squared(w, batch, model_state, rng):
    """Returns `w^2 x`, whose gradient is `2 w x`, with x as a metric."""
    x, weight = batch
    return w**2 * x, Returned({"x": x}, None, weight)


@pytest.mark.parametrize(
    ("weight", "x", "wanted"),
    [
        # At w = 3 and x = 2, the gradient is 12 and the loss 18.
        (None, 2, (12, 18, 2)),
        (5, 2, (60, 90, 10)),
        (0, 2, (0, 0, 0)),
        (0, np.nan, (0, 0, 0)),  # the batch is only padding
        (0, np.inf, (0, 0, 0)),
        (np.nan, 2, (np.nan, np.nan, np.nan)),  # the weight is below 0
    ],
)
def test_gradient_loss_and_metrics_are_multiplied_by_the_weight(weight, x, wanted):
    weight = None if weight is None else jnp.float32(weight)
    given = jnp.float32(3), (jnp.float32(x), weight), None, None
    *found, _ = contribution(squared, *given, axis_name="data", specs=())
    gradient, loss, metric = map(np.float32, wanted)
    assert_bits_equal(found, [gradient, Passengers.of(loss, {"x": metric}, weight)])


@pytest.mark.parametrize(
    ("weights", "gradients", "losses"),
    [
        ([1, 2], [7, 21], [4, 24]),
        ([0, 2], [6, 18], [0, 24]),
        ([0, 0], [0, 0], [0, 0]),
    ],
)
def test_collective_of_the_loss_sees_the_weights_of_all_devices(
    weights, gradients, losses
):
    """
    `L_j = x_j sum_k w_k x_k` on two devices, at w = 1 and x = (1, 3).

    The derivative of `sum_j W_j L_j` by `w_i` is `x_i sum_j W_j x_j`, and L is (4, 12).
    The derivative of `L_i` alone, times its weight, would be `W_i x_i^2`, and that of
    all losses would be `W_i x_i sum_j x_j`.
    """

    def full(w, batch, model_state, rng):
        x, weight = batch
        return x * lax.psum(w * x, "data"), Returned(None, None, weight)

    @functools.partial(
        jax.shard_map,
        mesh=pj.data_mesh(2),
        in_specs=(P(), P("data"), P("data")),
        out_specs=P("data"),
        check_vma=False,
    )
    def parts(w, x, weight):
        given = w, (x[0], weight[0]), None, None
        gradients, passengers, _ = contribution(
            full, *given, axis_name="data", specs=()
        )
        return gradients[None], passengers.loss[None]

    found = jax.jit(parts)(jnp.float32(1), np.float32([1, 3]), np.float32(weights))
    assert [x.tolist() for x in found] == [gradients, losses]


def stacked(losses, metrics, weights=None):
    """Returns the passengers of several microbatches."""
    each = zip(losses, metrics, weights or [None] * len(losses), strict=True)
    parts = [Passengers.of(loss, {"m": x}, weight) for loss, x, weight in each]
    return jax.tree.map(lambda *x: jnp.stack(x), *parts)


def test_microbatches_make_a_mean_or_with_weights_a_sum():
    gradients, numbers = np.float32([6, 9]), ([1, 2, 6], [0, 3, 3])
    found = combined(gradients, stacked(*numbers))
    assert_bits_equal(found, (np.float32([2, 3]), Passengers.of(3, {"m": 2})))
    found = combined(gradients, stacked(*numbers, [1, 0, 2]))
    assert_bits_equal(found, (gradients, Passengers.of(9, {"m": 6}, 3)))


@pytest.mark.parametrize("microbatches", [1, 2])
def test_float16_loss_times_its_tokens_may_exceed_float16(microbatches):
    def loss(params, batch):
        return 5 + 0 * (params * batch).mean(), pj.Aux(weight=np.float32(20_000))

    train = pj.make_train_step(
        loss,
        optax.sgd(0.1),
        mesh=pj.data_mesh(2),
        width=1,
        compute_dtype=jnp.float16,
        microbatches=microbatches,
    )
    _, info = train.step(train.init(np.float32(1)), np.ones(8, np.float32))
    assert float(info.loss) == 5


def test_float16_loss_with_a_collective_may_have_many_tokens():
    def loss(params, batch):
        mean = jax.lax.pmean((params * batch).mean(), "data")
        return mean, pj.Aux(weight=jnp.float32(80_000))

    train = pj.make_train_step(
        loss,
        optax.sgd(1.0),
        mesh=pj.data_mesh(2),
        width=1,
        compute_dtype=jnp.float16,
    )
    state, info = train.step(train.init(np.float32(1)), np.ones(4, np.float32))
    assert int(info.skipped) == 0
    assert float(state.params) == 0


def test_weight_beside_a_collective_is_refused_in_local_steps():
    def loss(w, batch):
        mean = lax.pmean((w * batch).mean(), "data")
        return (mean - 1) ** 2, pj.Aux(weight=batch.sum())

    train = pj.make_local_step(loss, optax.sgd(0.1), mesh=pj.data_mesh(2))
    with refused("`loss_fn` must not both return a weight and .* here over 'data'"):
        train.init(jnp.ones(()), batch=np.ones(4, np.float32))
