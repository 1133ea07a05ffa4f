"""A codec on one device's own gradients: what the others would be given."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from pipejax import codecs
from pipejax.codecs import Codec
from pipejax.collectives import Layout, Summands


class CompressState(NamedTuple):
    """What the codec keeps from one step to the next. Each device has its own.

    Attributes:
      codec: residuals, keys, warm starts; without leaves for most codecs.
    """

    codec: Any


def compress(codec: Codec) -> optax.GradientTransformation:
    """Replaces gradients by what is left of them after encoding and decoding.

      `update(g) = C(g)`

    Nothing is sent. In front of a plain `pmean` it shows what a codec does to training,
    without saving a byte; what saves bytes is `all_reduce_mean(axis, algorithm, codec)`
    or `pipelined_mean(..., all_reduce=algorithm(codec))`. All leaves together are one
    vector to the codec, as they are on the wire.

    Args:
      codec: of `pj.codecs`. A random one draws alike on every device; fold the device's
        number into its key, `jax.random.fold_in(key, jax.lax.axis_index("data"))`.

    Returns:
      A transformation, inside `shard_map` or not. If the codec keeps a state that
      differs between devices, give `shard_map` the specs of `pj.state_specs`.

    Raises:
      ValueError: for what is no codec; in `init`, for one that cannot encode these.

    >>> tx = compress(codecs.quantize(bits=1))
    >>> grads = {"w": jnp.array([0.5, -2.0, 1.0])}
    >>> tx.update(grads, tx.init(grads))[0]
    {'w': Array([ 1., -2.,  1.], dtype=float32)}
    """
    codec = codecs.check_codec(codec)

    def init_fn(params: optax.Params) -> CompressState:
        own, layout, n = _vector(codec, params)
        if not layout.coded_size:
            return CompressState(())
        own.size(n)  # raises what there is to raise
        return CompressState(own.init(n, jnp.uint32(0)))

    def update_fn(
        updates: optax.Updates,
        state: CompressState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, CompressState]:
        del params
        own, layout, n = _vector(codec, updates)
        if not layout.coded_size:
            return updates, state
        leaves, structure = jax.tree.flatten(updates)
        vector, nothing = layout.vectors(Summands(tuple(leaves)))
        padded = jnp.pad(vector, (0, n - vector.size))
        payload, after = own.encode(padded, state.codec)
        decoded = own.decode(payload, n)
        # What is not finite is skipped by whoever looks; nothing of it is kept.
        finite = jnp.isfinite(decoded).all()
        after = jax.tree.map(lambda a, b: jnp.where(finite, a, b), after, state.codec)
        arrays = layout.arrays(decoded[: vector.size], nothing).coded
        return jax.tree.unflatten(structure, arrays), CompressState(after)

    return optax.GradientTransformation(init_fn, update_fn)


def error_feedback(codec: Codec) -> optax.GradientTransformation:
    """`compress`, and what the codec loses is added to the next gradients.

      `update(g) = Delta = C(e + g)`,  `e <- e + g - Delta`

    Raises:
      ValueError: as `pj.codecs.error_feedback`.
    """
    return compress(codecs.error_feedback(codec))


def _vector(codec: Codec, tree: Any) -> tuple[Codec, Layout, int]:
    """Returns the codec for these arrays, their layout, and their padded length."""
    layout = Layout.of(Summands(tuple(jax.tree.leaves(tree))))
    own = codec.of(layout.shapes, layout.working_dtype)
    return own, layout, -(-layout.coded_size // own.multiple) * own.multiple
