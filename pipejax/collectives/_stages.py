"""Stages: an all-reduce as a sequence of local work and collectives.

A stage is local work followed by one collective. The local work after the last
collective is the finish:

- `psum`: one stage, which sums
- `two_shot`: encode, all-to-all | decode and sum, encode, all-gather | decode
- `ring`: `2 (p-1)` stages, each of which encodes and sends to the next device

Every collective needs the result of the one before. If all stages run back to back,
compute hides only the last collective. An executor that puts compute between the stages
hides each of them.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pipejax._internal.keys import as_numbers
from pipejax._internal.shards import over_own_axes
from pipejax._internal.wire import Transfer

# States of the codecs between two sums, by the name of the site.
States = dict[str, Any]
Stage = Callable[[tuple[Any, States]], tuple[Any, States]]


class Local(NamedTuple):
    """Local work of a device, without a collective.

    Attributes:
      run: Function from a value and the codec states to a new value and new states.
      encodes: Whether the work only prepares what the next collective sends.
    """

    run: Callable[[Any, States], tuple[Any, States]]
    encodes: bool = False


class Sent(NamedTuple):
    """A collective and what it moves.

    Attributes:
      run: Function from a value to a new value.
      transfers: What the collective moves. `psum` sums several arrays in one link, and
        has one transfer for each array or group of arrays.
      relative: The time of a byte, as a multiple of that of one between hosts.
    """

    run: Callable[[Any], Any]
    transfers: tuple[Transfer, ...]
    relative: float = 1.0


Link = Local | Sent
_INSIDE = 1 / 32


@dataclasses.dataclass(frozen=True)
class Stages:
    """An all-reduce, or a part of one, as a sequence of links.

    `run` runs the links back to back, while an executor may put compute between stages.
    `a + b` runs a, then b, so that an all-reduce is a reduce-scatter plus an
    all-gather.

    Attributes:
      links: Local work and collectives, in order. Together they turn
        `(summands, states)` into `(sums, states)`. The sums have the same bits on all
        devices.
      inits: Functions that return the states of the codecs before the first sum, each
        under different names. They are given what will stand before these names, so
        that random numbers differ wherever the stages are a part of others.
    """

    links: tuple[Link, ...]
    inits: tuple[Callable[[str], States], ...] = ()

    def __add__(self, other: "Stages") -> "Stages":
        return Stages(self.links + other.links, self.inits + other.inits)

    def guarded(self, usable: Callable[[], jax.Array]) -> "Stages":
        """Returns the same stages, which change no state unless `usable`.

        A state is then replaced where it is made, so that the new one may take the
        memory of the old one. An element that is not finite is never taken.

        Args:
          usable: Function that returns a bool scalar, the same on all devices. It is
            called only if there are states.
        """
        return Stages(tuple(_guarded(link, usable) for link in self.links), self.inits)

    def init(self, prefix: str = "") -> States:
        """Returns the states of the codecs on this device before the first sum.

        No array is a scalar, so that the arrays of all devices can be concatenated.

        Args:
          prefix: What will stand before the names of the states.
        """
        return {name: x for init in self.inits for name, x in init(prefix).items()}

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """Returns what each collective moves, in order."""
        return tuple(x for transfers in self.by_collective for x in transfers)

    @property
    def by_collective(self) -> tuple[tuple[Transfer, ...], ...]:
        """Returns what the collective of each stage moves."""
        return tuple(link.transfers for link in self.links if isinstance(link, Sent))

    @property
    def relative_times(self) -> list[float]:
        """Returns how long each stage sends, in bytes that cross between hosts."""
        sent = (link for link in self.links if isinstance(link, Sent))
        return [x.relative * sum(y.wire_bytes for y in x.transfers) for x in sent]

    @property
    def by_stage(self) -> list[list[Link]]:
        """Returns the links of each stage, and those of the finish."""
        stages: list[list[Link]] = [[]]
        for link in self.links:
            stages[-1].append(link)
            if isinstance(link, Sent):
                stages.append([])
        return stages

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Returns the stages, each a function of what the stage before returned."""
        return tuple(chained(links) for links in self.by_stage[:-1])

    @property
    def finish(self) -> Stage:
        """Returns the local work after the last stage, up to `(sums, states)`."""
        return chained(self.by_stage[-1])


def chained(links: Sequence[Link]) -> Stage:
    def stage(carry: tuple[Any, States]) -> tuple[Any, States]:
        value, states = carry
        for link in links:
            if isinstance(link, Sent):
                value = link.run(value)
            else:
                value, states = link.run(value, states)
        return value, states

    return stage


def local(function: Callable[[Any], Any]) -> Stages:
    """Returns stages of one local link, which applies `function` to the value."""
    return Stages((Local(lambda value, states: (function(value), states)),))


def on_first(stages: Stages) -> Stages:
    """Returns stages of pairs, which run `stages` on the first and keep the second."""

    def of_pair(link: Link) -> Link:
        if isinstance(link, Sent):
            return link._replace(run=lambda pair: (link.run(pair[0]), pair[1]))

        def run(pair: Any, states: States) -> tuple[Any, States]:
            value, states = link.run(pair[0], states)
            return (value, pair[1]), states

        return link._replace(run=run)

    return Stages(tuple(map(of_pair, stages.links)), stages.inits)


def inside_hosts(stages: Stages) -> Stages:
    """Returns the same stages, whose bytes stay inside of hosts, where links are fast.

    Devices of a host share its link. Each of 8 GPUs has an eighth of 200 Gbit/s, and
    between 10 and 100 times as much to the others. An exact number is not needed.
    """
    quick = (
        link._replace(relative=_INSIDE) if isinstance(link, Sent) else link
        for link in stages.links
    )
    return Stages(tuple(quick), stages.inits)


def _guarded(link: Link, usable: Callable[[], jax.Array]) -> Link:
    """Returns a link that changes no state unless `usable`."""
    if isinstance(link, Sent):
        return link
    barrier = functools.partial(over_own_axes, lax.optimization_barrier)

    def kept(new: jax.Array, old: jax.Array) -> jax.Array:
        if new is old:
            return old
        floats = jnp.issubdtype(new.dtype, jnp.inexact)
        takes = usable() & jnp.isfinite(new) if floats else usable()
        return jnp.where(takes, new, old)

    def run(value: Any, states: States) -> tuple[Any, States]:
        value, new = link.run(value, states)
        if all(map(operator.is_, *map(jax.tree.leaves, (new, states)))):
            return value, states
        # The new state is there before anything is sent. Later, what was encoded would
        # have to stay for it.
        return as_numbers(barrier, (value, jax.tree.map(kept, new, states)))

    return link._replace(run=run)


def renamed(stages: Stages, prefix: str) -> Stages:
    """Returns the same stages with `prefix` before the name of every state."""

    def own(link: Link) -> Link:
        if isinstance(link, Sent):
            return link

        def run(value: Any, states: States) -> tuple[Any, States]:
            # Two uses of one algorithm keep their states in one dict. A link sees only
            # its own.
            mine = {
                name.removeprefix(prefix): x
                for name, x in states.items()
                if name.startswith(prefix)
            }
            value, mine = link.run(value, mine)
            return value, states | {prefix + name: x for name, x in mine.items()}

        return link._replace(run=run)

    def init(outer: str) -> States:
        own = stages.init(outer + prefix)
        return {prefix + name: x for name, x in own.items()}

    return Stages(tuple(map(own, stages.links)), (init,))


def run(
    stages: Stages, summands: Any, states: States | None = None
) -> tuple[Any, States]:
    """Runs all stages back to back, without compute between them.

    Must be called inside the `jax.shard_map` in which the stages were made.

    Args:
      stages: What an algorithm returned for arrays of this layout.
      summands: Arrays of this device.
      states: States of the codecs, as `stages.init()` or the previous call returned
        them. With `None`, the codecs start from `stages.init()`.

    Returns:
      The sums over all devices, and the states for the next call.

    Raises:
      ValueError: If `states` are those of another all-reduce, codec or number of
        devices.

    Examples:
      Every device contributes its part of an array:

      >>> import jax
      >>> import jax.numpy as jnp
      >>> import pipejax as pj
      >>> from jax.sharding import PartitionSpec as P
      >>> from pipejax.collectives import Layout, Summands, run, two_shot
      >>> def total(x):
      ...     stages = two_shot()(Layout.of_shapes((x.shape,)), "data")
      ...     sums, _ = run(stages, Summands((x,)))
      ...     return sums.coded[0]
      >>> mesh = pj.data_mesh()
      >>> program = jax.shard_map(
      ...     total, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False
      ... )
      >>> sums = jax.jit(program)(jnp.ones(mesh.size))
      >>> float(sums[0]) / mesh.size
      1.0
    """
    carry: Any = summands, stages.init() if states is None else states
    for stage in (*stages.stages, stages.finish):
        carry = stage(carry)
    return carry
