"""A codec on the gradients of one device: shows what other devices would receive."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from pipejax import codecs
from pipejax._core.message import CompressState, Message, mean_as, travelling
from pipejax._internal.numbers import check_inexact
from pipejax.codecs import Codec
from pipejax.collectives import Layout, Summands


def compress(codec: Codec) -> optax.GradientTransformation:
    """Replaces gradients by what is left of them after encoding and decoding.

    With the gradient g and the codec C (encoding followed by decoding):

    $$update(g) = C(g)$$

    In front of a plain `pmean`, the transformation shows what a codec does to training,
    but saves no bytes, unlike `pipelined_mean(..., all_reduce=ring(codec))`. The codec
    is given all leaves together as one vector. An algorithm may cut this vector before
    it encodes it, which changes the ranges and blocks of a codec, and in float16 it
    leaves room for the sum over devices. If the decoded gradients are not finite, the
    state of the codec does not change.

    Args:
      codec: A codec of `pj.codecs`. If it is random, fold the number of the device into
        its key: `jax.random.fold_in(key, jax.lax.axis_index("data"))`. All devices draw
        the same numbers otherwise.

    Returns:
      A transformation, to be used inside or outside of `shard_map`. If the codec keeps
      a state that differs between devices, give `shard_map` the specs of
      `pj.state_specs`.

    Raises:
      ValueError: If `codec` is not a codec. In `init` and `update`, also for integer
        leaves. In `init`, also if the codec cannot encode gradients of these shapes.

    Warns:
      UserWarning: If the codec is biased and has no error feedback.

    Examples:
      With error feedback, a codec that sends one element of two sends 4 in the second
      step, because the first step left a residual of 2:

      >>> tx = compress(codecs.error_feedback(codecs.top_k(1)))
      >>> grads = jnp.float32([3, 2])
      >>> state = tx.init(grads)
      >>> for _ in range(2):
      ...     sent, state = tx.update(grads, state)
      ...     print(sent)
      [3. 0.]
      [0. 4.]
    """
    codec = codecs.check_codec(codec)

    def init_fn(params: optax.Params) -> CompressState:
        check_inexact("params", params)
        own, layout, n = _vector(codec, params)
        if not layout.coded_size:
            return CompressState(())
        own.size(n)  # raises an error if the codec cannot encode these gradients
        return CompressState(own.init(n, jnp.uint32(0)))

    def update_fn(
        updates: optax.Updates,
        state: CompressState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, CompressState]:
        del params
        check_inexact("updates", updates)
        own, layout, n = _vector(codec, updates)
        if not layout.coded_size:
            return updates, state
        leaves, structure = jax.tree.flatten(travelling(updates, None))
        vector, nothing = layout.vectors(Summands(tuple(leaves)))
        padded = jnp.pad(vector, (0, n - vector.size))
        payload, after = own.encode(padded, state.codec)
        # XLA would leave out a cast to fewer bits and back.
        decoded = own.decode(lax.optimization_barrier(payload), n)
        # A later transformation may skip an update that is not finite. The codec must
        # then keep nothing of it.
        finite = jnp.isfinite(decoded).all()
        after = jax.tree.map(lambda a, b: jnp.where(finite, a, b), after, state.codec)
        arrays = layout.arrays(decoded[: vector.size], nothing).coded
        sent = jax.tree.unflatten(structure, arrays)
        return mean_as(sent, updates, Message(sent), devices=1), CompressState(after)

    return optax.GradientTransformation(init_fn, update_fn)


def _vector(codec: Codec, tree: Any) -> tuple[Codec, Layout, int]:
    """Returns the codec for these arrays, their layout, and their padded length."""
    layout = Layout.of(Summands(tuple(jax.tree.leaves(travelling(tree, None)))))
    own = codec.of(layout.shapes, layout.working_dtype)
    return own, layout, -(-layout.coded_size // own.multiple) * own.multiple
