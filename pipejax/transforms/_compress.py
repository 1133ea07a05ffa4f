"""A codec on one device's own gradients: what the others would be given."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from pipejax import buckets, codecs
from pipejax.codecs import Codec
from pipejax.codecs._codec import working_dtype
from pipejax.collectives._all_reduce import check_codec


class CompressState(NamedTuple):
    """What the codec keeps from one step to the next. Each device has its own.

    Attributes:
      codec_states: by dtype: residuals, keys, warm starts; without leaves for most.
    """

    codec_states: Any


def compress(codec: Codec) -> optax.GradientTransformation:
    """Replaces gradients by what is left of them after encoding and decoding.

      `update(g) = C(g)`

    Nothing is sent. In front of a plain `pmean` it shows what a codec does to training,
    without saving a byte; what saves bytes is `all_reduce_mean(axis, algorithm, codec)`
    or `pipelined_mean(..., all_reduce=algorithm(codec))`. All leaves of one dtype are
    one vector to the codec, as they are on the wire.

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
    codec = check_codec(codec)

    def init_fn(params: optax.Params) -> CompressState:
        states = {}
        for name, own, n in _vectors(codec, params):
            own.size(n)  # raises what there is to raise
            states[name] = own.init(n, jnp.uint32(0))
        return CompressState(states)

    def update_fn(
        updates: optax.Updates,
        state: CompressState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, CompressState]:
        del params
        flat, states = buckets.flatten(updates), dict(state.codec_states)
        for name, own, n in _vectors(codec, updates):
            vector = flat[name].astype(working_dtype(name))
            padded = jnp.pad(vector, (0, n - vector.size))
            payload, after = own.encode(padded, states[name])
            decoded = own.decode(payload, n)
            finite = buckets.all_finite({name: decoded}, {name: n})
            # What is not finite is skipped by whoever looks; nothing of it is kept.
            states[name] = jax.tree.map(
                lambda new, old, finite=finite: jnp.where(finite, new, old),
                after,
                states[name],
            )
            flat[name] = decoded[: vector.size].astype(name)
        return buckets.unflatten(flat, updates), CompressState(states)

    return optax.GradientTransformation(init_fn, update_fn)


def error_feedback(codec: Codec) -> optax.GradientTransformation:
    """`compress`, and what the codec loses is added to the next gradients.

      `update(g) = Delta = C(e + g)`,  `e <- e + g - Delta`

    Raises:
      ValueError: as `pj.codecs.error_feedback`.
    """
    return compress(codecs.error_feedback(codec))


def _vectors(codec: Codec, tree: Any) -> list[tuple[str, Codec, int]]:
    """Of each dtype that has elements: its name, its codec, its length when padded."""
    shapes = buckets.shapes(tree)
    vectors = []
    for name, n in buckets.sizes(tree).items():
        own = codec.of(shapes[name], working_dtype(name))
        if n:
            vectors.append((name, own, -(-n // own.multiple) * own.multiple))
    return vectors
