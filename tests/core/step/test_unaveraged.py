"""Tests that model state which is not averaged must be the same on all devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import pipejax as pj

from ...train_step.refusals import refused

BATCH = np.arange(32, dtype=np.float32).reshape(16, 2) / 8


def loss_of(after):
    """Returns a loss whose state `n` is what `after` says."""

    def loss_fn(params, batch, *, model_state, rng):
        loss = jnp.mean((batch @ params - 1) ** 2)
        n = after(model_state["n"], batch, rng, params, model_state["mean"])
        mean = 0.5 * (model_state["mean"] + batch.mean())
        return loss, pj.Aux(model_state={"n": n, "mean": mean})

    return loss_fn


def started(after, make=pj.make_train_step, **options):
    train = make(loss_of(after), optax.sgd(0.1), mesh=pj.data_mesh(4), **options)
    state = {"n": jnp.int32(0), "mean": jnp.float32(0)}
    return train, train.init(jnp.zeros(2), model_state=state, rng=jax.random.key(0))


DIFFERENT = {
    "batch": lambda n, x, rng, w, mean: n + (x > 1).sum(),
    "keys": lambda n, x, rng, w, mean: n + jax.random.randint(rng, (), 0, 9),
    "parameters": lambda n, x, rng, w, mean: n + (w > 0).sum(),
    "averaged state": lambda n, x, rng, w, mean: n + (mean > 0),
    "place": lambda n, x, rng, w, mean: n + lax.axis_index("data"),
    "branch": lambda n, x, rng, w, mean: lax.cond(
        x[0, 0] > 0, lambda: n, lambda: n + 1
    ),
    "loop": lambda n, x, rng, w, mean: lax.fori_loop(
        0, 3, lambda i, m: m + (x[i, 0] > 1), n
    ),
}
MESSAGE = (
    r"`loss_fn` must return integers, booleans and keys .* got `model_state\['n'\]` of"
    r" dtype int32, .* jax\.lax\.psum\(x, 'data'\)"
)


@pytest.mark.parametrize("kind", DIFFERENT)
def test_state_of_different_values_on_devices_is_refused(kind):
    train, state = started(DIFFERENT[kind])
    with refused(MESSAGE):
        train.step(state, BATCH)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (pj.make_train_step, {"width": 1}),
        (pj.make_train_step, {"microbatches": 2}),
        (pj.make_train_step, {"executor": "host"}),
        (pj.make_local_step, {"sync_every": 2}),
    ],
)
def test_count_of_data_is_refused_by_every_step(make, options):
    train, state = started(DIFFERENT["batch"], make, **options)
    with refused(MESSAGE):
        train.step(state, BATCH)


def test_batch_shows_a_count_of_data_before_the_first_step():
    train, _ = started(DIFFERENT["batch"])
    state = {"n": jnp.int32(0), "mean": jnp.float32(0)}
    with refused(MESSAGE):
        train.init(jnp.zeros(2), model_state=state, rng=jax.random.key(0), batch=BATCH)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_sums_over_devices_and_counts_are_taken(microbatches):
    def after(n, x, rng, w, mean):
        def layer(carry, w):
            n, x = carry
            return (n + 1, jnp.tanh(w * x)), None

        (n, _), _ = lax.scan(jax.checkpoint(layer), (n, x), jnp.ones(3))
        return n + lax.psum((x > 1).sum(), "data")

    train, state = started(after, microbatches=microbatches)
    for _ in range(2):
        state, _ = train.step(state, BATCH)
    count = 2 * (3 * microbatches + (BATCH > 1).sum())
    parts = state.model_state["n"].addressable_shards
    assert [int(part.data) for part in parts] == [count] * 4
