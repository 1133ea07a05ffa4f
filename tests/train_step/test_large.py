"""Tests programs for more elements than int32 can count, which are not run."""

import jax
import jax.numpy as jnp
import optax
import pytest

import pipejax as pj
from pipejax._core.message import layout_of
from pipejax._core.step import empty_message

from ..collectives.cases import ALGORITHMS, CODECS, PAIRS

PARAMS = {
    "one leaf": {"w": jax.ShapeDtypeStruct((65536, 40000), jnp.float32)},
    "many leaves": {
        name: jax.ShapeDtypeStruct((32768, 16384), jnp.float32) for name in "abcde"
    },
}
WAYS = [(name, None) for name in ALGORITHMS] + PAIRS
QUICK = {
    ("one leaf", "psum", None),
    ("many leaves", "two_shot", "int8"),
    ("one leaf", "hierarchical", "top_k+feedback"),
}
CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.full)
    for case in ((params, *way) for params in PARAMS for way in WAYS)
]


def make(name, codec):
    hosts, axis_name = None, "data"
    if name == "hierarchical":
        hosts, axis_name = 2, ("host", "device")

    def loss_fn(params, batch):
        return batch.mean() * sum(jnp.vdot(x[0], x[0]) for x in params.values())

    return pj.make_train_step(
        loss_fn,
        optax.sgd(0.1),
        mesh=pj.data_mesh(4, axis_name=axis_name, hosts=hosts),
        axis_name=axis_name,
        all_reduce=ALGORITHMS[name](CODECS[codec]) if codec else ALGORITHMS[name](),
    )


@pytest.mark.parametrize(("params", "name", "codec"), CASES)
def test_large_step_compiles_and_knows_its_bytes(params, name, codec):
    params, train = PARAMS[params], make(name, codec)
    state = jax.eval_shape(train.init, params)
    batch = jax.ShapeDtypeStruct((4, 8), jnp.float32)
    like = jax.eval_shape(lambda: empty_message(train.settings, state.params, None))
    elements = layout_of(like).coded_size
    assert elements > 2**31
    memory = train.lower(state, batch).compile().memory_analysis()
    # The parameters and the gradients in flight are arguments, 4 bytes each.
    assert memory.argument_size_in_bytes >= 2 * 4 * elements
    if codec is None:
        # No all-reduce over p devices sends less than 2 (p-1) / p of the vector.
        sent = sum(x.wire_bytes for x in train.transfers(state, batch))
        assert sent >= 1.5 * 4 * elements
