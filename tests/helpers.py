"""Provides a small regression with real curvature, which the tests share."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax


def init_params(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "hidden": rng.normal(size=(5, 7)).astype(np.float32) / 2,
        "bias": np.zeros(7, np.float32),
        "out": rng.normal(size=(7, 3)).astype(np.float32) / 2,
    }


def loss_fn(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["hidden"] + params["bias"][None, :])
    return jnp.mean((hidden @ params["out"] - batch["y"]) ** 2)


def batches(steps, size=16, seed=1):
    rng = np.random.default_rng(seed)
    return [
        {
            "x": rng.normal(size=(size, 5)).astype(np.float32),
            "y": rng.normal(size=(size, 3)).astype(np.float32),
        }
        for _ in range(steps)
    ]


OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.05, momentum=0.9),
    "adamw": optax.adamw(1e-2, weight_decay=0.1),
    "clip+adamw": optax.chain(
        optax.clip_by_global_norm(0.3), optax.adamw(1e-2, weight_decay=0.1)
    ),
}


def held(name, m):
    """Returns an optimizer that clips as at the gradient m, whatever its gradient."""
    if name != "clip+adamw":
        return OPTIMIZERS[name]
    factor = jnp.minimum(1, 0.3 / optax.tree.norm(m))
    return optax.chain(optax.scale(factor), optax.adamw(1e-2, weight_decay=0.1))


# Linear optimizers predict by own gradients in either case.
HELD = {name: functools.partial(held, name) for name in ("adamw", "clip+adamw")}


def trajectory(train, params, data, *, drain=True):
    """Returns the parameters after every step, and after the drain if there is one."""
    state, out = train.init(params), []
    for batch in data:
        state, _ = train.step(state, batch)
        out.append(state.params)
    return [*out, train.drain(state)[0].params] if drain else out


def assert_bits_equal(a, b):
    """Asserts that two pytrees have the same structure, dtypes and bits."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), strict=True)


@contextlib.contextmanager
def x64():
    """Enables x64, and raises an error where JAX would promote mixed dtypes."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        yield


def normal_batches(count, size, inputs, outputs):
    """Returns batches of `size` examples, x of length `inputs` and y of `outputs`."""
    rng = np.random.default_rng(1)

    def normal(length):
        return rng.normal(size=(size, length)).astype(np.float32)

    return [{"x": normal(inputs), "y": normal(outputs)} for _ in range(count)]


def with_trainable(state, **changes):
    """Returns a state with other parameters, or another optimizer state."""
    return state._replace(trainable=state.trainable._replace(**changes))


def wrap_exchange(host, wrapper):
    """Makes a host executor exchange messages by `wrapper(exchange, *args)`."""
    exchange = host._programs.exchange
    wrapped = functools.partial(wrapper, exchange)
    # `cached_property` stores the programs here.
    host.__dict__["_programs"] = host._programs._replace(exchange=wrapped)
