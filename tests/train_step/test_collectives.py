"""
Tests what a step sends: an all-reduce for each array, counted in the lowered program.

XLA combines all-reduces where that pays. With a threshold, `psum` joins short arrays
first.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax

import pipejax as pj
from pipejax._core.step import common_of

from ..grid import grid
from ..helpers import batches, init_params, loss_fn

DEVICES = 4


def lowered(train, state, *batch):
    """Returns the StableHLO of the step, or that of the drain without a batch."""
    if batch:
        return train.lower(state, *batch).as_text()
    return train.executor._drain.lower(common_of(state), state.in_flight).as_text()


TOGETHER = pj.collectives.psum(combine_threshold_bytes=1 << 20)


def all_reduces(text):
    """Returns the types of all all-reduces, such as `65xf32`, and allows no others."""
    collectives = re.findall(
        r"stablehlo\.(all_reduce|all_gather|all_to_all|reduce_scatter"
        r"|collective_permute|collective_broadcast|send|recv)\b",
        text,
    )
    assert set(collectives) <= {"all_reduce"}, collectives
    # The type stands after the region: `}) : (tensor<65xf32>) -> tensor<65xf32>`.
    types = re.findall(
        r'"stablehlo\.all_reduce".*?\}\) : \((.*?)\) ->', text, flags=re.DOTALL
    )
    assert len(types) == len(collectives)
    return sorted(re.fullmatch(r"tensor<(\w+)>", operand)[1] for operand in types)


def full_loss(params, batch, *, model_state, rng):
    noise = jax.random.normal(rng, batch["x"].shape)
    loss = loss_fn(params, batch | {"x": batch["x"] + 0.1 * noise})
    mean = 0.9 * model_state["mean"] + 0.1 * batch["x"].mean(0)
    after = {"mean": mean, "seen": model_state["seen"] + 1}
    metrics = {"loss": loss, "by_feature": list(batch["x"].mean(0))}
    return loss, pj.Aux(metrics=metrics, model_state=after)


MESSAGES = {
    # Three gradients, five means of features, and a vector of loss and metrics.
    "alone": (pj.collectives.psum(), ["5x7xf32", "5xf32", "7x3xf32", "7xf32", "7xf32"]),
    "together": (TOGETHER, ["75xf32"]),
}


@grid(1, width=[3, 2, 1, 4], name=MESSAGES)
def test_full_step_has_the_all_reduces_of_one_message(name, width):
    """The step has metrics, model state, a key, microbatches, clipping and AdamW."""
    all_reduce, sums = MESSAGES[name]
    train = pj.make_train_step(
        full_loss,
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
        mesh=pj.data_mesh(DEVICES),
        width=width,
        microbatches=2,
        all_reduce=all_reduce,
    )
    (batch,) = batches(1)
    state = train.init(
        init_params(),
        model_state={"mean": np.zeros(5, np.float32), "seen": np.int32(0)},
        rng=jax.random.key(0),
        batch=batch,
    )
    assert all_reduces(lowered(train, state, batch)) == sums
    assert all_reduces(lowered(train, state)) == sorted(sums * (width - 1))


def mixed_params():
    params = jax.tree.map(jnp.asarray, init_params())
    return params | {"hidden": params["hidden"].astype(jnp.bfloat16)}


def with_accuracy(params, batch):
    loss = loss_fn(params, batch)
    return loss, pj.Aux(metrics={"squared": loss**2})


DTYPES = {
    "f32": (init_params, None, ["65xf32"]),
    "mixed": (mixed_params, None, ["30xf32", "5x7xbf16"]),
    # Loss and metric are exact.
    "f32-as-bf16": (init_params, jnp.bfloat16, ["2xf32", "63xbf16"]),
    "mixed-as-bf16": (mixed_params, jnp.bfloat16, ["2xf32", "63xbf16"]),
    "mixed-as-f32": (mixed_params, jnp.float32, ["65xf32"]),
}


@grid(1, name=DTYPES, width=[1, 2, 3])
def test_combined_step_has_one_all_reduce_for_each_dtype(name, width):
    params, reduce_dtype, types = DTYPES[name]
    train = pj.make_train_step(
        with_accuracy,
        optax.sgd(0.1),
        mesh=pj.data_mesh(DEVICES),
        width=width,
        reduce_dtype=reduce_dtype,
        all_reduce=TOGETHER,
    )
    (batch,) = batches(1)
    state = train.init(params(), batch=batch)
    assert all_reduces(lowered(train, state, batch)) == types
    assert all_reduces(lowered(train, state)) == sorted(types * (width - 1))


def test_warm_up_has_as_many_all_reduces_as_a_step():
    train = pj.make_train_step(
        loss_fn,
        optax.sgd(0.1),
        mesh=pj.data_mesh(DEVICES),
        width=2,
        warmup_steps=3,
    )
    (batch,) = batches(1)
    state = train.plain.init(init_params())
    sums = ["1xf32", "5x7xf32", "7x3xf32", "7xf32"]
    assert all_reduces(lowered(train.plain, state, batch)) == sums


def linear(w, batch):
    """Returns a loss whose gradient is the mean of the batch, at any w."""
    return w * batch.mean()


@grid(1, width=[4, 3, 2, 1], devices=[2, 8, 4, 1])
def test_rank_coded_gradients_give_exact_parameters(width, devices):
    """
    Device i sends (i + 1) 2^t in step t, so sums are exact and show each sender.

    The mean is (p + 1) / 2 2^t. With a learning rate of 1, w[t] is minus the sum of the
    means that have arrived, and the drain adds the rest.
    """
    train = pj.make_train_step(
        linear, optax.sgd(1.0), mesh=pj.data_mesh(devices), width=width
    )
    state, steps = train.init(np.float32(0)), 6
    for t in range(steps):
        batch = np.repeat(np.arange(1, devices + 1, dtype=np.float32), 2) * 2**t
        state, info = train.step(state, batch)
        arrived = max(0, t + 2 - width)
        assert float(state.params) == -(devices + 1) / 2 * (2**arrived - 1)
        assert bool(info.applied) == (arrived > 0)
    drained, _ = train.drain(state)
    assert float(drained.params) == -(devices + 1) / 2 * (2**steps - 1)
