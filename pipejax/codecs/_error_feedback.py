"""Error feedback for a lossy codec: what the codec loses is sent later.

The rule is the same at every delay. The residual that is added to a message comes from
the message that was sent just before it.

If a message is not finite, its update is skipped. The caller then restores the codec's
state from before that message, so that no NaN or infinity enters the residual.
"""

import dataclasses
import numbers
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import DTypeLike

from pipejax._internal.ravel import Shapes, ravel

from ._codec import Codec, Linear
from ._sparse import RandomK


class ErrorFeedbackState(NamedTuple):
    """State of `error_feedback`: the residual and the wrapped codec's state.

    Attributes:
      residual: What the codec still has to send: a vector `[n]`, or arrays in the
        shapes of the gradients if the codec `needs_leaves`. The dtype is float64 for
        float64 gradients and float32 otherwise.
      codec: The state of the wrapped codec.
    """

    residual: Any
    codec: Any


@dataclasses.dataclass(frozen=True)
class ErrorFeedback(Linear):
    """Adds error feedback to `codec`; see `error_feedback`."""

    codec: Codec
    decay: float = 1.0
    dtype: str = "float32"

    @property
    def multiple(self) -> int:
        return self.codec.multiple

    @property
    def needs_leaves(self) -> bool:
        return self.codec.needs_leaves

    @property
    def rounds(self) -> int:
        return self.codec.rounds

    def of(
        self,
        shapes: Shapes | None = None,
        dtype: DTypeLike = jnp.float32,
        devices: int = 1,
    ) -> "ErrorFeedback":
        codec = self.codec.of(shapes, dtype, devices)
        return dataclasses.replace(self, codec=codec, dtype=jnp.dtype(dtype).name)

    def leaves(self, x: jax.Array) -> Any:
        return self.codec.leaves(x)

    def init(self, n: int, seed: jax.Array) -> ErrorFeedbackState:
        nothing = self.codec.leaves(jnp.zeros(n, self.dtype))
        return ErrorFeedbackState(nothing, self.codec.init(n, seed))

    def size(self, n: int) -> int:
        return self.codec.size(n)

    def encode(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        """Encodes `x` plus the residual; the new residual is what this loses."""
        due = x.astype(self.dtype) + ravel(jax.tree.leaves(self._kept(state)))
        payload, inner = self.codec.encode(due, state.codec)
        # The residual must be computed from the payload that is sent. Without the
        # barrier, XLA would encode a second time here and round differently.
        payload = lax.optimization_barrier(payload)
        sent = self.codec.decode(payload, x.size)
        lost = self.codec.leaves(due - sent.astype(self.dtype))
        return payload, ErrorFeedbackState(lost, inner)

    def decode(self, payload: jax.Array, n: int) -> jax.Array:
        return self.codec.decode(payload, n)

    def round_sizes(self, n: int) -> tuple[int, ...]:
        return self._linear.round_sizes(n)

    def project(
        self, leaves: Any, state: Any, sums: tuple[jax.Array, ...]
    ) -> jax.Array:
        due = optax.tree.add(leaves, self._kept(state))
        return self._linear.project(due, state.codec, sums)

    def rebuild(self, state: Any, sums: tuple[jax.Array, ...], n: int) -> Any:
        return self._linear.rebuild(state.codec, sums, n)

    def settled(
        self, leaves: Any, state: Any, sums: tuple[jax.Array, ...], own: jax.Array
    ) -> Any:
        due = optax.tree.add(leaves, self._kept(state))
        size = optax.tree.size(leaves)
        # With this device's own contribution in place of the last round's sum, the
        # codec returns the device's part of the decoded sum.
        sent = self._linear.rebuild(state.codec, (*sums[:-1], own), size)
        inner = self._linear.settled(due, state.codec, sums, own)
        return ErrorFeedbackState(optax.tree.sub(due, sent), inner)

    def _kept(self, state: ErrorFeedbackState) -> Any:
        """Returns what is left of the residual when the next vector is encoded."""
        if self.decay == 1:
            return state.residual
        return optax.tree.scale(self.decay, state.residual)

    @property
    def _linear(self) -> Linear:
        return cast(Linear, self.codec)


def error_feedback(codec: Codec, decay: float = 1.0) -> ErrorFeedback:
    r"""Wraps a codec so that it sends in later steps what it lost in earlier steps.

    Let `g` be the gradient, `C` the codec (encoding followed by decoding) and `e` the
    residual, which starts at zero. Each step sends the encoded sum of gradient and
    residual. The loss of the codec is the new residual:

    $$\Delta = C(e + g), \quad e \leftarrow e + g - \Delta$$

    The sum of everything sent then differs from the sum of all gradients only by the
    current residual:

    $$\sum \Delta = \sum g - e$$

    With a `decay` below 1, the residual is multiplied by it before it is added:

    $$\Delta = C(\beta e + g), \quad e \leftarrow \beta e + g - \Delta$$

    where `beta` is the decay. Old losses are then forgotten, and the residual stays
    smaller. In return, a part of each gradient is never sent. Use it if losses are sent
    so late that gradients have changed in the meantime.

    Use a codec that `needs_feedback` only with error feedback. For other codecs, error
    feedback is optional and costs the memory of the residuals.

    Each place where an algorithm encodes a vector has its own residual, as long as that
    vector. `two_shot`, for example, encodes both before and after the sum over devices,
    as Tang et al. do. With p devices, each device keeps one element for every element
    of its own gradient, and one for every element of the p-th part that it sums.

    Args:
      codec: The codec to wrap.
      decay: The factor of the residual in each step, above 0 and at most 1.

    Returns:
      A codec with the same payload format. Its state is an `ErrorFeedbackState`.

    Raises:
      ValueError: If `codec` is not a codec, if it already has error feedback, or if it
        is a `random_k` that scales its values up, because its residual would grow. If
        `decay` breaks its rule.

    Examples:
      The codec sends one element of two. The second step sends 4 because the first step
      left a residual of 2:

      >>> from pipejax import codecs
      >>> codec = error_feedback(codecs.top_k(1))
      >>> gradient, state = jnp.float32([3, 2]), codec.init(2, jnp.uint32(0))
      >>> for _ in range(2):
      ...     payload, state = codec.encode(gradient, state)
      ...     print(codec.decode(payload, 2), state.residual)
      [3. 0.] [0. 2.]
      [0. 4.] [3. 0.]

    References:
      Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019,
      https://arxiv.org/abs/1901.09847

      Stich et al., Sparsified SGD with Memory, NeurIPS 2018,
      https://arxiv.org/abs/1809.07599

      Tang et al., DoubleSqueeze, 2019, https://arxiv.org/abs/1905.05957

      Wu et al., Error Compensated Quantized SGD, which has the decay, ICML 2018,
      https://arxiv.org/abs/1806.08054
    """
    if isinstance(codec, ErrorFeedback) or not isinstance(codec, Codec):
        raise ValueError(
            "`codec` must be a codec without feedback, such as pj.codecs.sign(); got"
            f" {codec!r}."
        )
    if isinstance(codec, RandomK) and codec.scaled:
        raise ValueError(
            "`codec` must not scale its values up under error feedback, because the"
            f" residual would grow; got {codec}. Use random_k(k, key, scaled=False)."
        )
    is_number = isinstance(decay, numbers.Real) and not isinstance(decay, bool)
    if not (is_number and 0 < decay <= 1):
        raise ValueError(
            f"`decay` must be a number above 0 and at most 1; got {decay!r}. Use 1 to"
            " send everything in the end."
        )
    return ErrorFeedback(codec, float(decay))
