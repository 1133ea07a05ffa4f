"""The backend's own all-reduce, of arrays in their own shapes."""

import dataclasses
import functools
import zlib
from typing import Any, cast

import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from pipejax.codecs import Codec, Linear, check_codec
from pipejax.integers import is_integer
from pipejax.mesh import AxisName, axis_size
from pipejax.vectors import apart, joined

from ._all_reduce import AllReduce
from ._groups import Groups
from ._layout import Layout, Summands
from ._sites import check_kept
from ._stages import Local, Sent, Stages, States, local
from ._wire import Transfer

MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Psum(AllReduce):
    """See `psum`."""

    codec: Linear | None
    together: int | None

    def __call__(self, layout: Layout, axis_name: AxisName) -> Stages:
        """One stage; with a codec, one for each round."""
        if self.codec is None:
            return _in_own_shapes(layout, axis_name, self.together or 0)
        codec = self.codec.of(layout.shapes, layout.working_dtype)
        return _rounds(cast(Linear, codec), layout, axis_name)

    def init(self, layout: Layout, axis_name: AxisName) -> States:
        """As of every algorithm; without a codec, outside `shard_map` too."""
        return super().init(layout, axis_name) if self.codec else {}

    def on(self, mesh: Mesh) -> "Psum":
        """Joins short arrays between CPU processes and on TPUs, unless told otherwise.

        XLA combines all-reduces into one that takes several arrays. On GPUs such an
        all-reduce is one kernel. Between CPU processes it still exchanges its arrays
        one after another, and the compiler for TPUs makes it synchronous.
        """
        if self.together is not None or self.codec is not None:
            return self
        platform = mesh.devices.flat[0].platform
        one_by_one = platform == "cpu" and mesh.is_multi_process
        together = MIB if platform == "tpu" or one_by_one else 0
        return dataclasses.replace(self, together=together)


def _in_own_shapes(layout: Layout, axis_name: AxisName, together: int) -> Stages:
    """Sums arrays in their own shapes and dtypes, all in one stage."""
    groups = Groups.of((*layout.coded, *layout.exact), together)
    p, coded = axis_size(axis_name), len(layout.coded)

    def pack(summands: Summands, states: States) -> tuple[Any, States]:
        return groups.together((*summands.coded, *summands.exact)), states

    def send(arrays: Any) -> Any:
        return tuple(lax.psum(x, axis_name) for x in arrays)

    def unpack(sums: Any) -> Summands:
        arrays = groups.separate(sums)
        return Summands(arrays[:coded], arrays[coded:])

    transfers = tuple(Transfer("all-reduce", p, size) for size in groups.bytes)
    links = Local(pack, encodes=True), Sent(send, transfers)
    return Stages(links) + local(unpack)


def _rounds(codec: Linear, layout: Layout, axis_name: AxisName) -> Stages:
    """The rounds of a linear codec; the value is what is sent, and all that is kept."""
    n, dtype = layout.coded_size, layout.working_dtype

    def init() -> States:
        # The same on all devices: what they send is added up unread.
        seed = jnp.uint32(zlib.crc32(b"psum"))
        return {"psum": codec.init(n, seed)}

    def begin(summands: Summands) -> Any:
        arrays = tuple(x.astype(dtype) for x in summands.coded)
        coded = arrays if codec.needs_leaves else joined(arrays, dtype)
        return coded, joined(summands.exact, dtype), ()

    def project(round: int) -> Local:
        def run(value: Any, states: States) -> tuple[Any, States]:
            leaves, exact, sums = value
            check_kept("psum", states.get("psum", ()), functools.partial(codec.init, n))
            own = codec.project(leaves, states["psum"], sums).astype(dtype)
            last = round == codec.rounds - 1
            sent = jnp.concatenate([own, exact]) if last and exact.size else own
            return (sent, (leaves, exact, sums, own)), states

        return Local(run, encodes=True)

    def send(value: Any) -> Any:
        sent, (leaves, exact, sums, own) = value
        total = lax.psum(sent, axis_name)
        exact = total[own.size :] if total.size > own.size else exact
        return leaves, exact, (*sums, total[: own.size]), own

    def finish(value: Any, states: States) -> tuple[Summands, States]:
        leaves, exact, sums, own = value
        state = states["psum"]
        total = codec.rebuild(state, sums, n)
        states = {**states, "psum": codec.settled(leaves, state, sums, own)}
        arrays = total if codec.needs_leaves else apart(total, layout.coded)
        pairs = zip(arrays, layout.coded, strict=True)
        coded = tuple(x.astype(form.dtype) for x, form in pairs)
        return Summands(coded, apart(exact, layout.exact)), states

    p = axis_size(axis_name)
    total = Stages((), (init,)) + local(begin)
    for round, size in enumerate(codec.round_sizes(n)):
        if round == codec.rounds - 1:
            size += layout.exact_size
        sent = Sent(send, (Transfer("all-reduce", p, dtype.itemsize * size),))
        total += Stages((project(round), sent))
        if round < codec.rounds - 1:
            total += local(lambda value: value[:3])
    return total + Stages((Local(finish),))


def psum(codec: Codec | None = None, *, together: int | None = None) -> Psum:
    """Sums by `lax.psum`, with whatever algorithm the backend has.

    Each array is summed in its own shape and dtype, and is copied neither before nor
    after.

    Args:
      codec: `None`, or a linear one, `power_sgd` or `random_k`, with feedback or
        without: what it makes of every device's vector is added up unread, in float32,
        or float64 where the vector is.
      together: arrays that are shorter than this many bytes travel as one vector for
        each dtype. `None` chooses by the mesh of `make_train_step`: 1 MiB on TPUs and
        between CPU processes, else 0.

    Raises:
      ValueError: for a codec whose payloads cannot be added, or a `together` that is no
        number of bytes or stands beside a codec.
    """
    if together is not None and not is_integer(together, 0):
        raise ValueError(
            "`together` must be a whole number of bytes, or None; got"
            f" {together!r}. Choose 0 to send every array alone."
        )
    if codec is None:
        return Psum(None, together)
    if together is not None:
        raise ValueError(
            f"`together` must be None beside a codec, got {together!r}: a codec sends"
            " one vector of all arrays. Leave it out."
        )
    if not check_codec(codec).rounds:
        raise ValueError(
            "`codec` must be linear under psum, which adds what it is given:"
            f" pj.codecs.power_sgd or random_k; got {codec}. Choose another algorithm,"
            " such as pj.collectives.two_shot(codec)."
        )
    return Psum(cast(Linear, codec), None)
