"""The all-reduce of the backend, `lax.psum`, on arrays in their own shapes."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from pipejax._internal.integers import is_integer
from pipejax._internal.mesh import AxisName, axes, axis_size
from pipejax._internal.ranges import scaled_down, scaled_up
from pipejax._internal.wire import Transfer
from pipejax.codecs import Codec, Linear, check_codec

from ._all_reduce import AllReduce
from ._combined import Combined
from ._layout import Layout, Summands
from ._linear_rounds import LinearRounds
from ._stages import Local, Sent, Stages, States, local

MIB = 1 << 20
Add = Callable[[jax.Array], jax.Array]
"""A function that sums an array over devices."""


@dataclasses.dataclass(frozen=True)
class Psum(AllReduce):
    codec: Linear | None
    combine_threshold_bytes: int | None  # `None` until `on` has chosen it
    # By how many places the reversed group is turned, where XLA would merge sums.
    turn: int = 0
    scatters: bool = False  # the backend's reduce-scatter and all-gather may be used

    def __call__(self, layout: Layout, axis_name: AxisName) -> Stages:
        """Returns one stage, or with a codec one stage for each of its rounds."""
        turn = self.turn if _merges(axis_name) else None
        add = functools.partial(_sum, axis_name=axis_name, turn=turn)
        if self.codec is None:
            return _in_own_shapes(
                layout, axis_name, add, self.combine_threshold_bytes or 0
            )
        p = axis_size(axis_name)
        codec = cast(Linear, self.codec.of(layout.shapes, layout.working_dtype, p))
        total = functools.partial(_as_one, p=p, add=add)
        return LinearRounds(codec, layout, total).stages()

    def init(self, layout: Layout, axis_name: AxisName) -> States:
        """Returns the states of the codec on this device before the first sum."""
        # Without a codec, this also works outside of `shard_map`.
        return super().init(layout, axis_name) if self.codec else {}

    def unmerged(self) -> "Psum":
        return dataclasses.replace(self, turn=self.turn + 1)

    def on(self, mesh: Mesh) -> "Psum":
        # XLA combines all-reduces into one that takes several arrays. On GPUs, such an
        # all-reduce is one kernel. Between CPU processes, it still sends its arrays one
        # after another. On TPUs, the compiler makes it synchronous.
        platform = mesh.devices.flat[0].platform
        own = dataclasses.replace(
            self,
            # Between CPU processes, the backend's reduce-scatter can return wrong
            # values, https://github.com/jax-ml/jax/issues/40830
            scatters=platform != "cpu" and self.codec is None,
        )
        # The user has chosen a threshold, or a codec sends all arrays as one vector.
        if self.combine_threshold_bytes is not None or self.codec is not None:
            return own
        one_by_one = platform == "cpu" and mesh.is_multi_process
        threshold = MIB if platform == "tpu" or one_by_one else 0
        return dataclasses.replace(own, combine_threshold_bytes=threshold)


def _merges(axis_name: AxisName) -> bool:
    """Returns whether XLA may merge sums over these axes with others, as on GPUs."""
    mesh = jax.sharding.get_abstract_mesh()
    device, names = mesh.abstract_device, axes(axis_name)
    if device is None or device.platform not in ("gpu", "cuda"):
        return False
    # With `check_vma`, `psum` takes no groups.
    tracks = jax.typeof(lax.axis_index(names)).manual_axis_type.varying
    return {*names} <= {*mesh.manual_axes} and not tracks


def _sum(x: jax.Array, axis_name: AxisName, *, turn: int | None) -> jax.Array:
    """Sums an array over devices, merged by XLA only with sums of the same `turn`."""
    # XLA merges all-reduces over the same group of devices into one, which starts only
    # when the operands of all are computed: a sum of gradients would wait for the loss.
    # For XLA, a group in another order is another group.
    if turn is None:
        return lax.psum(x, axis_name)
    devices = axis_size(axis_name)
    group = [(turn - place) % devices for place in range(1, devices + 1)]
    return lax.psum(x, axis_name, axis_index_groups=[group])


def _as_one(layout: Layout, p: int, add: Add) -> Stages:
    """Returns one stage that sums a coded and an exact vector as a single one."""
    size = layout.coded_size

    def pack(summands: Summands, states: States) -> tuple[jax.Array, States]:
        vectors = (*summands.coded, *summands.exact)
        return (jnp.concatenate(vectors) if summands.exact else vectors[0]), states

    def unpack(total: jax.Array) -> Summands:
        if not layout.exact:
            return Summands((total,))
        coded, exact = jnp.split(total, [size])
        return Summands((coded,), (exact,))

    nbytes = layout.working_dtype.itemsize * (size + layout.exact_size)
    sent = Sent(add, (Transfer("all-reduce", p, nbytes),))
    return Stages((Local(pack, encodes=True), sent)) + local(unpack)


def _in_own_shapes(
    layout: Layout, axis_name: AxisName, add: Add, threshold: int
) -> Stages:
    """Returns one stage that sums all arrays in their own shapes and dtypes."""
    groups = Combined.of((*layout.coded, *layout.exact), threshold)
    p, coded = axis_size(axis_name), len(layout.coded)

    def pack(summands: Summands, states: States) -> tuple[Any, States]:
        arrays = (*summands.coded, *summands.exact)
        # The backend adds in the dtype of the arrays, where float16 could overflow.
        return groups.combine([scaled_down(x, p) for x in arrays]), states

    def send(arrays: Any) -> Any:
        return tuple(map(add, arrays))

    def unpack(sums: Any) -> Summands:
        arrays = tuple(scaled_up(x, p) for x in groups.separate(sums))
        return Summands(arrays[:coded], arrays[coded:])

    transfers = tuple(Transfer("all-reduce", p, size) for size in groups.bytes)
    links = Local(pack, encodes=True), Sent(send, transfers)
    return Stages(links) + local(unpack)


def psum(
    codec: Codec | None = None, *, combine_threshold_bytes: int | None = None
) -> Psum:
    r"""Sums with `lax.psum`, the all-reduce of the backend.

    Without a codec, each array is summed in its own shape and dtype. An array that
    travels alone is copied neither before nor after the sum. With a linear codec C and
    the vector `x_i` of device i, payloads can be summed without being decoded:

    $$\sum_i C(x_i) = C(\sum_i x_i)$$

    All other codecs need an algorithm that decodes before it sums, such as `two_shot`.

    Args:
      codec: `None` or a linear codec: `power_sgd`, `acp_sgd` or `random_k`, with or
        without `error_feedback`. Its payloads are summed in float32, or in float64 if
        any array is float64.
      combine_threshold_bytes: Arrays of fewer bytes travel as one vector for each
        dtype, which saves latency and costs a copy. With `None`, `make_train_step`
        chooses the threshold by its mesh: 1 MiB on TPUs and between CPU processes, and
        otherwise 0.

    Returns:
      An `AllReduce` over any number of axes, which it treats as one.

    Raises:
      ValueError: If `codec` is not a linear codec, if the threshold is not a whole
        number of bytes, or if both are given.

    Examples:
      The four rows of `jax.vmap` stand for four devices:

      >>> import jax
      >>> import jax.numpy as jnp
      >>> from pipejax.collectives import Layout, Summands, psum, run
      >>> def total(x):
      ...     stages = psum()(Layout.of_shapes((x.shape,)), "data")
      ...     sums, _ = run(stages, Summands((x,)))
      ...     return sums.coded[0]
      >>> jax.vmap(total, axis_name="data")(jnp.arange(4.0))
      Array([6., 6., 6., 6.], dtype=float32)
    """
    threshold = combine_threshold_bytes
    if threshold is not None and not is_integer(threshold, 0):
        raise ValueError(
            "`combine_threshold_bytes` must be a whole number of bytes, or None; got"
            f" {threshold!r}. Choose 0 to send every array alone."
        )
    if codec is None:
        return Psum(None, threshold)
    if threshold is not None:
        raise ValueError(
            "`combine_threshold_bytes` must be None if there is a codec, got"
            f" {threshold!r}: a codec sends all arrays as one vector. Leave it out."
        )
    if not check_codec(codec).rounds:
        raise ValueError(
            "`codec` must be linear under psum, which sums payloads without decoding"
            f" them: pj.codecs.power_sgd, acp_sgd or random_k; got {codec}. Choose"
            " another algorithm, such as pj.collectives.two_shot(codec)."
        )
    return Psum(cast(Linear, codec), None)
