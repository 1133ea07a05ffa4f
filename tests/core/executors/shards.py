"""Makes a message that two groups of two devices shard."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax import codecs
from pipejax._core.executors import StepConfig
from pipejax._core.executors._codec_states import codec_states_of
from pipejax._core.message import Message
from pipejax._core.step import Settings, replicated_step
from pipejax._internal.shards import Shards
from pipejax.collectives import psum, two_shot


def sharded(codec=None, bad=False):
    """Returns the configuration of two groups of two devices, and a sharded message."""
    mesh = pj.data_mesh(4, axis_name=("data", "fsdp"), hosts=2)
    feedback = None if codec is None else codecs.error_feedback(codec)
    all_reduce = psum() if codec is None else two_shot(feedback)
    step = replicated_step(Settings(None, None, "data"))
    config = StepConfig(step, mesh, 2, all_reduce, donate=False)
    rng = np.random.default_rng(0)
    w, b = (rng.normal(size=n).astype(np.float32) for n in ((2 * 6, 5), (2 * 3,)))
    if bad:
        w[7, 2] = np.inf  # at the first place of the second group
    split = NamedSharding(mesh, P(("data", "fsdp"))), NamedSharding(mesh, P("data"))
    gradients = dict(zip("wb", map(jax.device_put, (w, b), split), strict=True))
    shards = Shards(params=(P(), P("fsdp")))  # of "b" and "w"
    message = Message(gradients, shards=shards)
    like = Message(
        {
            "w": jax.ShapeDtypeStruct((6, 5), jnp.float32),
            "b": jax.ShapeDtypeStruct((3,), jnp.float32),
        },
        shards=shards,
    )
    return config, message, codec_states_of(config, like)
