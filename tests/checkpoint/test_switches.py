"""Tests that `jax.config` and `jax.set_mesh` change nothing in a checkpoint."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import pipejax as pj
from pipejax import checkpoint

from ..grid import each
from ..helpers import batches, init_params
from . import zoo
from .helpers import feedback, init, run, train_step

MOMENTUM = optax.sgd(0.1, momentum=0.9)


def explicit(shape, names):
    return jax.set_mesh(jax.make_mesh(shape, names, (AxisType.Explicit,) * len(shape)))


SWITCHES = {
    "strict dtypes": lambda: jax.numpy_dtype_promotion("strict"),
    "no transfers": lambda: jax.transfer_guard("disallow"),
    "no NaN": lambda: jax.debug_nans(True),
    "no infinities": lambda: jax.debug_infs(True),
    "explicit mesh of the same name": lambda: explicit((8,), ("data",)),
    "explicit mesh of other names": lambda: explicit((2, 4), ("x", "model")),
    "leaks": jax.checking_leaks,
    "checks": lambda: jax.enable_checks(True),
    "x64": lambda: jax.enable_x64(True),
}


@pytest.mark.parametrize(
    "switch",
    each(
        SWITCHES,
        full=[
            *("no transfers", "no NaN", "no infinities", "leaks", "checks", "x64"),
            "explicit mesh of other names",
        ],
    ),
)
def test_every_bit_is_restored_under_every_switch(manager, switch):
    train = zoo.train_step(8)
    state = zoo.filled_at_random(zoo.init(train))
    like = jax.eval_shape(lambda: zoo.init(train))
    with SWITCHES[switch]():
        checkpoint.save(manager, state, {"position": 1})
        restored = checkpoint.restore(manager, train, like)
    zoo.assert_same(restored.state, state)


OTHERS = each(
    [name for name in SWITCHES if name != "x64"],
    full=[
        *("no transfers", "no NaN", "no infinities", "leaks", "checks"),
        *("strict dtypes", "explicit mesh of other names"),
    ],
)


@pytest.mark.parametrize("switch", OTHERS)
def test_codec_states_begin_anew_on_other_devices(manager, switch):
    train, other = feedback(4, width=1), feedback(2, width=1)
    checkpoint.save(manager, run(train, init(train), batches(3)))
    like = jax.eval_shape(lambda: init(other))
    expected = checkpoint.restore(manager, other, like).state
    with SWITCHES[switch]():
        found = checkpoint.restore(manager, other, like).state
    assert int(found.calls) == int(expected.calls) == 3
    zoo.assert_same(found._replace(calls=None), expected._replace(calls=None))


@pytest.mark.parametrize("switch", OTHERS)
def test_gradients_in_flight_are_applied_on_other_devices(manager, switch):
    """Uses SGD with momentum, because Optax's Adam fails under strict promotion."""
    train, other = train_step(4, tx=MOMENTUM), train_step(2, tx=MOMENTUM)
    checkpoint.save(manager, run(train, init(train), batches(3)))
    like = jax.eval_shape(lambda: init(other))
    expected = checkpoint.restore(manager, other, like)
    with SWITCHES[switch]():
        found = checkpoint.restore(manager, other, like)
    assert found.drained
    assert [bool(info.arrived) for info in found.infos] == [True]
    zoo.assert_same(found.state, expected.state)
    zoo.assert_same(found.infos, expected.infos)


def wide(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["hidden"] + params["bias"][None, :])
    return jnp.mean((hidden @ params["out"] - batch["y"]) ** 2)


@pytest.mark.parametrize("devices", each([4, 2], full=[4]))
def test_float64_run_continues_in_float64_on_other_devices(manager, devices):
    """A run with float64 parameters continues in float64, drained on other devices."""
    with jax.enable_x64(True):
        made = [
            pj.make_train_step(wide, optax.adamw(1e-2), mesh=pj.data_mesh(n))
            for n in (4, devices)
        ]
        train, other = made
        params = jax.tree.map(np.float64, init_params())
        data = jax.tree.map(np.float64, batches(4))
        state = run(train, train.init(params), data)
        checkpoint.save(manager, state)
        restored = checkpoint.restore(manager, other, other.init(params))
        assert restored.drained == (devices != 4)
        if devices == 4:
            zoo.assert_same(restored.state, state)
        for got, want in zip(
            jax.tree.leaves(other.drain(restored.state)[0].params),
            jax.tree.leaves(train.drain(state)[0].params),
            strict=True,
        ):
            assert got.dtype == np.float64
            # Means over devices are summed in another order in float64.
            np.testing.assert_allclose(got, want, rtol=1e-14, atol=1e-14)


def test_float64_checkpoint_is_refused_without_x64(manager):
    train = train_step()
    with jax.enable_x64(True):
        params = jax.tree.map(np.float64, init_params())
        checkpoint.save(manager, train.init(params, rng=jax.random.key(0)))
    with pytest.raises(ValueError, match=r"params.*saved float64\[7\], wanted float32"):
        checkpoint.restore(manager, train, init(train))
