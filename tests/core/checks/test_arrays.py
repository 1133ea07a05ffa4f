"""Tests the messages for leaves that are no arrays of numbers, and for other keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pipejax._core.checks._arrays import fault_of

from ...train_step.refusals import BATCH, make, refused


class Tensor:
    """An array of another library."""

    shape, dtype = (16, 2), "torch.float32"

    def __init__(self, fails=False):
        self.fails = fails

    def __array__(self, dtype=None, copy=None):
        if self.fails:
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        return np.ones(self.shape, np.float32)


FAULTS = {
    "strings": (np.array(["a"] * 16), "an array of dtype <U1"),
    "bytes": (np.array([b"a"] * 16), r"an array of dtype \|S1"),
    "objects": (np.array([None] * 16), "an array of dtype object"),
    "dates": (np.zeros(16, "M8[s]"), r"an array of dtype datetime64\[s\]"),
    "times": (np.zeros(16, "m8[s]"), r"an array of dtype timedelta64\[s\]"),
    "records": (np.zeros(16, [("a", "f4")]), "an array of dtype .*'a'.*"),
    "another byte order": (np.ones(16, ">f4"), "an array of dtype >f4"),
    "masked": (np.ma.masked_array(np.ones(16)), "a masked array, whose mask JAX does"),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_batch_must_hold_arrays_of_numbers(kind):
    leaf, said = FAULTS[kind]
    train, batch = make(), BATCH | {"extra": {"more": leaf}}
    state = train.init({"w": jnp.ones(2)})
    message = (
        rf"must hold arrays of numbers, got `{{}}\['extra'\]\['more'\]`, {said}.* Leave"
        r" it out, or convert it: categories to integers"
    )
    with refused(message.format("local")):
        train.batch(batch)
    for call in (train.step, train.lower):
        with refused(message.format("batch")):
            call(state, batch)
    with refused(message.format("batch")):
        train.init({"w": jnp.ones(2)}, batch=batch)


def test_arrays_of_another_library_need_a_conversion():
    train = make()
    assert train.batch({"x": Tensor()})["x"].shape == (16, 2)
    with refused(r"got `local\['x'\]`, a Tensor: can't convert cuda:0 .* Leave it"):
        train.batch({"x": Tensor(fails=True)})
    state = train.init({"w": jnp.ones(2)})
    with refused(r"`batch\['x'\]`, a Tensor\. .* `train.batch` converts the arrays of"):
        train.step(state, {"x": Tensor()})


def test_arrays_of_numbers_are_told_from_other_leaves():
    key = jax.random.key(0)
    for leaf in (1, 2.0, True, np.float32(1), np.ones(1, bool), jnp.ones(1), key):
        assert fault_of(leaf) is None
    for dtype in (jnp.bfloat16, jnp.float8_e4m3fn, jnp.int4):
        assert fault_of(np.ones(1, dtype)) is None
    for leaf in ("text", b"text", object(), len, np.ones(1, np.longdouble)):
        assert fault_of(leaf) is not None


def test_model_state_must_hold_arrays_of_numbers():
    def loss(params, batch, *, model_state):
        return 0.0

    with refused(
        r"`model_state` must hold arrays of numbers, got `model_state\['n'\]`"
    ):
        make(loss).init({"w": jnp.ones(2)}, model_state={"n": "name"})


RNGS = {
    "an int": (3, "`rng`, a int in"),
    "a list of ints": ([0, 1], r"`rng\[0\]`, a int in"),
    "a seed": (np.uint32(0), r"`rng`, uint32\[\] in"),
    "another array": (np.zeros(3, np.uint32), r"`rng`, uint32\[3\] in"),
    "several keys": (jax.random.split(jax.random.key(0), 3), r"`rng`, key<fry>\[3\]"),
    "streams": (
        nnx.Rngs(0),
        r"`rng.*count.*`, uint32\[\] in .*nnx.Rngs\(rng",
    ),
    "a name": ({"dropout": "key"}, r"`rng\['dropout'\]`, a str in"),
    "a number": (1.0, "`rng`, a float in"),
}


def with_rng(params, batch, *, rng):
    return 0.0


@pytest.mark.parametrize("kind", RNGS)
def test_rng_must_be_a_key_or_a_pytree_of_keys(kind):
    rng, said = RNGS[kind]
    message = f"`rng` must be a PRNG key or a pytree of keys, got {said}"
    for call in (make(with_rng).init, make(with_rng).abstract_state):
        with refused(message):
            call({"w": jnp.ones(2)}, rng=rng)


def test_rng_must_hold_at_least_one_key():
    with refused(
        r"`rng` must hold at least one PRNG key, got {}\. Pass `jax.random.key"
    ):
        make(with_rng).init({"w": jnp.ones(2)}, rng={})
