"""Helpers of the tests of gradients that are exchanged at once."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax import checkpoint

from ...helpers import batches, init_params, trajectory

STEPS = 6
# Parameters whose lengths divide between two devices of a group.
PARAMS = {
    "hidden": np.sin(np.arange(40, dtype=np.float32)).reshape(5, 8) / 2,
    "bias": np.zeros(8, np.float32),
    "out": np.cos(np.arange(24, dtype=np.float32)).reshape(8, 3) / 2,
}
PLACES = {"hidden": P(None, "fsdp"), "bias": P("fsdp"), "out": P("fsdp")}


def groups():
    """Returns a mesh of two groups of two devices, and parameters sharded in each."""
    mesh = pj.data_mesh(4, axis_name=("host", "fsdp"), hosts=2)
    params = {
        name: jax.device_put(leaf, NamedSharding(mesh, PLACES[name]))
        for name, leaf in PARAMS.items()
    }
    return mesh, params


def trained(make, **settings):
    """Returns the parameters after a few steps and a drain."""
    return trajectory(make(**settings), init_params(), batches(STEPS))[-1]


def noting_norm():
    """Returns a transformation whose state is the norm of what it is given."""

    def init(params):
        del params
        return jnp.zeros(())

    def note(updates, state, params=None):
        del state, params
        return updates, optax.tree.norm(updates)

    return optax.GradientTransformation(init, note)


def with_and_without_a_restart(make, folder):
    """Returns the parameters of a run, and of one restored in its middle."""
    train, data, ends = make(), batches(6), []
    state = train.init(init_params())
    for batch in data[:3]:
        state, _ = train.step(state, batch)
    with checkpoint.manager(folder) as manager:
        checkpoint.save(manager, state)
        manager.wait_until_finished()
        fresh = make()
        restored = checkpoint.restore(manager, fresh, fresh.init(init_params())).state
    for step, last in ((train, state), (fresh, restored)):
        for batch in data[3:]:
            last, _ = step.step(last, batch)
        ends.append(jax.device_get(step.drain(last)[0].params))
    return ends
