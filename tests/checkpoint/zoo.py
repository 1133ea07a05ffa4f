"""Makes states with leaves of every structure and dtype and with random bits."""

import collections
import dataclasses
import functools
from typing import Any, NamedTuple

import flax.core
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import pipejax as pj


class Pair(NamedTuple):
    first: Any
    second: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    kernel: Any
    name: str = dataclasses.field(default="layer", metadata={"static": True})


@jax.tree_util.register_pytree_node_class
class Bare:
    """A pytree node whose children have no names."""

    def __init__(self, *children):
        self.children = children

    def tree_flatten(self):
        return self.children, None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def leaf():
    return np.ones(3, np.float32)


def nested(depth):
    tree = leaf()
    for _ in range(depth):
        tree = {"k": tree}
    return tree


STRANGE = (
    "a",
    "a/b",
    "a.b",
    "",
    " ",
    ".",
    "..",
    "a\nb",
    "\0",
    "\ud800",
    "é%2F",
    "x" * 600,
)


def params():
    return {
        "dots": {"a.b": leaf(), "a": {"b": leaf(), "b.c": leaf(), ".": {"": leaf()}}},
        "strange": {name: leaf() for name in STRANGE},
        "integers": {1: leaf(), 10: leaf(), 2: [leaf(), (leaf(),)]},
        "tuples": {(1,): leaf(), (1, 2): leaf()},
        "types": collections.OrderedDict([("1", leaf()), (1, leaf()), (None, leaf())]),
        "frozen": flax.core.freeze({"b": {"c": leaf()}, "a": leaf()}),
        "classes": Pair(Layer(leaf()), Bare(leaf(), {"first": leaf()})),
        "nnx": nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0))),
        "none": {"none": None, "nothing": {}, "list": []},
        "empty": {"row": np.ones((0, 3), np.float32), "half": jnp.ones(0, "bfloat16")},
        "scalar": np.float32(1.5),
        "weak": jnp.asarray(1.5),
        "deep": nested(100),
    } | {dtype: jnp.ones((2, 3), dtype) for dtype in FLOATING}


FLOATING = ("bfloat16", "float16")
WHOLE = ("int2", "uint2", "bool", "int4", "uint4", "int8", "uint8", "int16", "uint32")
TINY = ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn")


def model_state():
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "keys": {
            "one": jax.random.key(0),
            "several": keys,
            "none": keys[:0],
            "raw": jax.random.PRNGKey(1),
            "other": jax.random.key(2, impl="rbg"),
        },
        "complex": jnp.ones(2, jnp.complex64),
    } | {dtype: jnp.ones((2, 3), dtype) for dtype in (*WHOLE, *TINY)}


def loss_fn(params, batch):
    raise NotImplementedError("no step is taken")


@functools.cache
def train_step(devices):
    return pj.make_train_step(
        loss_fn, optax.sgd(0.1, momentum=0.9), mesh=pj.data_mesh(devices)
    )


def init(train):
    # The keys are added later: in jobs of several processes, `jax.device_put` does not
    # accept typed keys.
    everywhere = NamedSharding(train.mesh, PartitionSpec())
    made = jax.jit(model_state, out_shardings=everywhere)()
    return train.init(params())._replace(model_state=made)


def filled_at_random(state):
    """Returns the state with random bits in every leaf but `step`, NaN among them."""
    rng = np.random.default_rng(0)
    filled = jax.tree.map(lambda leaf: _at_random(rng, leaf), state)
    return filled._replace(step=state.step)


def _at_random(rng, leaf):
    if getattr(leaf, "weak_type", False):
        return leaf
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = _at_random(rng, jax.random.key_data(leaf))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    value = _bits(rng, leaf.shape, leaf.dtype)
    return jax.make_array_from_callback(
        leaf.shape, leaf.sharding, lambda index: value[index]
    )


NARROW = {"bool": 1, "int2": 2, "uint2": 2, "int4": 4, "uint4": 4, "float4_e2m1fn": 4}


def _bits(rng, shape, dtype):
    if dtype.name in NARROW:
        return rng.integers(2 ** NARROW[dtype.name], size=shape).astype(dtype)
    whole = rng.integers(256, size=(*shape, dtype.itemsize), dtype=np.uint8)
    return whole.view(dtype)[..., 0]


def assert_same(got, want):
    """Asserts equal structure, types, shardings and bits, those of NaN and -0.0 too."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    leaves = jax.tree_util.tree_leaves_with_path(want)
    for (path, leaf), other in zip(leaves, jax.tree.leaves(got), strict=True):
        assert jax.typeof(other) == jax.typeof(leaf), path
        assert other.sharding.is_equivalent_to(leaf.sharding, leaf.ndim), path
        assert _shards(other) == _shards(leaf), path


def _shards(leaf):
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return {x.device: np.asarray(x.data).tobytes() for x in leaf.addressable_shards}
