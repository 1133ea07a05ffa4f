"""The backend's own all-reduce."""

import dataclasses
import functools
import zlib
from typing import Any, cast

import jax.numpy as jnp
from jax import lax

from pipejax import buckets
from pipejax.buckets import Buckets
from pipejax.codecs import Codec, Linear
from pipejax.concatenate import joined
from pipejax.mesh import AxisName

from ._all_reduce import AllReduce, axis_size, check_codec
from ._layout import Layout, Summands
from ._sites import check_kept
from ._stages import Local, Sent, Stages, States, local
from ._wire import Transfer


@dataclasses.dataclass(frozen=True)
class Psum(AllReduce):
    """See `psum`."""

    codec: Linear | None

    def __call__(self, layout: Layout, axis_name: AxisName) -> Stages:
        """One stage; with a codec, one for each round."""
        if self.codec is None:
            return _by_dtype(layout, axis_name)
        codec = self.codec.of(layout.shapes, layout.working_dtype)
        return _rounds(cast(Linear, codec), layout, axis_name)

    def init(self, layout: Layout, axis_name: AxisName) -> States:
        """As of every algorithm; without a codec, outside `shard_map` too."""
        return super().init(layout, axis_name) if self.codec else {}


def _rounds(codec: Linear, layout: Layout, axis_name: AxisName) -> Stages:
    """The rounds of a linear codec; the value is what is sent, and all that is kept."""
    n, dtype = layout.coded_size, layout.working_dtype

    def init() -> States:
        # The same on all devices: what they send is added up unread.
        seed = jnp.uint32(zlib.crc32(b"psum"))
        return {"psum": codec.init(n, seed)}

    def begin(summands: Summands) -> Any:
        coded, exact = layout.vectors(summands)
        return codec.leaves(coded), exact, ()

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
        return layout.arrays(joined(total), exact), states

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


def _by_dtype(layout: Layout, axis_name: AxisName) -> Stages:
    """Sums arrays in their own dtypes, in one collective for each dtype."""
    like = Summands(layout.coded, layout.exact)
    p = axis_size(axis_name)

    def flatten(summands: Summands, states: States) -> tuple[Buckets, States]:
        return buckets.flatten(summands), states

    def send(vectors: Buckets) -> Buckets:
        return {name: lax.psum(vector, axis_name) for name, vector in vectors.items()}

    def unflatten(vectors: Buckets) -> Summands:
        return buckets.unflatten(vectors, like)

    transfers = tuple(
        Transfer("all-reduce", p, jnp.dtype(name).itemsize * size)
        for name, size in buckets.sizes(like).items()
    )
    links = Local(flatten, encodes=True), Sent(send, transfers)
    return Stages(links) + local(unflatten)


def psum(codec: Codec | None = None) -> Psum:
    """`lax.psum`, in each array's own dtype: whatever algorithm the backend has.

    Args:
      codec: `None`, or a linear one, `power_sgd` or `random_k`, with feedback or
        without: what it makes of every device's vector is added up unread, in float32,
        or float64 where the vector is.

    Raises:
      ValueError: for a codec whose payloads cannot be added.
    """
    if codec is None:
        return Psum(None)
    if not check_codec(codec).rounds:
        raise ValueError(
            "`codec` must be linear under psum, which adds what it is given:"
            f" pj.codecs.power_sgd or random_k; got {codec}. Choose another algorithm,"
            " such as pj.collectives.two_shot(codec)."
        )
    return Psum(cast(Linear, codec))


PSUM = psum()  # the default of everything that sums
