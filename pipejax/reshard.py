"""What each device has for itself, handed on to another number of devices.

- gradients in flight: every device is given their mean as its own, so that the mean
  that arrives is the same
- what error feedback has yet to send, e: from p devices to p', each given an equal
  share of `p'/p sum e`, so that what it adds to a mean in the end, `sum e / p`, is the
  same
- both under weights, `sum W g / sum W`: every device is given an equal share of the
  sum, because the sum of the weights of a batch does not depend on the number of
  devices
- keys and warm starts of codecs begin anew

All that the old devices had lies on every new one for a moment. That a loss function
returns weights shows in the messages in flight; at width 1 there are none, and what
error feedback has yet to send is handed on as without weights.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .collectives import AllReduce, Layout
from .collectives._residuals import owed, owing
from .mesh import AxisName, Rows, axes
from .message import InFlight, Message, codec_states, layout_of
from .train_step import PipelineState, TrainStep


class Spread(NamedTuple):
    """Over how many devices something lies.

    Attributes:
      devices: that share the data.
      kept: extents above 1, by name and in order, of the data's axes on the mesh on
        which codecs keep what they keep; `None` where they keep nothing.
    """

    devices: int
    kept: dict[str, int] | None

    @classmethod
    def of(cls, state: PipelineState) -> "Spread":
        """That of a state, not of its shapes."""
        devices = state.in_flight.filled.shape[0]
        kept = jax.tree.leaves(state.in_flight.codec_states)
        if not kept:
            return cls(devices, None)
        sharding = kept[0].sharding
        names = axes(sharding.spec[0]) if sharding.spec else ()
        return cls(devices, _above_one(sharding.mesh, names))

    @classmethod
    def now(cls, train: TrainStep, like: PipelineState) -> "Spread":
        """That of the states of `train`, or of their shapes."""
        devices = train.config.devices
        if not jax.tree.leaves(like.in_flight.codec_states):
            return cls(devices, None)
        names = axes(train.axis_name)
        return cls(devices, _above_one(train.executor.reduction_mesh, names))

    def same_as(self, other: "Spread", train: TrainStep) -> bool:
        """Whether what lies on one is laid out as on the other."""
        if self.devices != other.devices or None in (self.kept, other.kept):
            return self == other
        phases, name = train.schedule.phases, train.axis_name
        return all(_mapped(x, name, self) == _mapped(x, name, other) for x in phases)


def shapes_on(train: TrainStep, like: PipelineState, spread: Spread) -> PipelineState:
    """The shapes of a state of `train`, were its devices these."""
    now = train.config.devices

    def resized(leaf: Any) -> jax.ShapeDtypeStruct:
        size = leaf.shape[0] // now * spread.devices
        return jax.ShapeDtypeStruct((size, *leaf.shape[1:]), leaf.dtype)

    states: dict[str, Any] = {}
    for all_reduce in train.schedule.phases:
        states |= _init(all_reduce, train, like, spread)
    in_flight = jax.tree.map(resized, like.in_flight._replace(codec_states={}))
    return like._replace(in_flight=in_flight._replace(codec_states=states))


def reshard(train: TrainStep, state: PipelineState, before: Spread) -> PipelineState:
    """The state on the devices of `train`, everything replicated as it was.

    Args:
      train: whose state this is to be.
      state: whose `in_flight` is that of other devices, all of it on each.
      before: of those.
    """
    states, in_flight = train.codec_states(state.params), state.in_flight
    layout = layout_of(train.gradients_form(state.params))
    now = train.config.devices
    weighted = any(message.weight is not None for message in in_flight.pending)
    times = 1.0 if weighted else now / before.devices
    for all_reduce in train.schedule.phases if before.kept is not None else ():
        old = state.in_flight.codec_states
        total = sum_owed(all_reduce, layout, train.axis_name, before, old)
        states = _handed_on(all_reduce, layout, train, times, total, states)
    own = NamedSharding(train.mesh, P(train.axis_name))

    def spread(in_flight: InFlight) -> InFlight:
        if before.devices == now:
            return in_flight
        return _shared_out(in_flight, before.devices, now)

    in_flight = in_flight._replace(codec_states={})
    in_flight = jax.jit(spread, out_shardings=own)(in_flight)
    return state._replace(in_flight=in_flight._replace(codec_states=states))


def _shared_out(in_flight: InFlight, before: int, now: int) -> InFlight:
    """Returns what is in flight, for another number of devices: each has the same."""

    def rows(leaf: jax.Array) -> jax.Array:
        return leaf.reshape(before, leaf.shape[0] // before, *leaf.shape[1:])

    def mean(leaf: jax.Array) -> jax.Array:
        one = rows(leaf).mean(axis=0).astype(leaf.dtype)
        return jnp.concatenate([one] * now)

    def share(leaf: jax.Array) -> jax.Array:
        one = (rows(leaf).sum(axis=0) / now).astype(leaf.dtype)
        return jnp.concatenate([one] * now)

    def shared_out(message: Message) -> Message:
        by = mean if message.weight is None else share
        return Message(
            gradients=jax.tree.map(by, message.gradients),
            changes=jax.tree.map(mean, message.changes),
            passengers=jax.tree.map(by, message.passengers),
        )

    return in_flight._replace(
        pending=tuple(map(shared_out, in_flight.pending)),
        # The same on all devices. A mean of integers could come out one too small.
        filled=jnp.repeat(in_flight.filled[:1], now),
        deviation=jax.tree.map(mean, in_flight.deviation),
    )


def _init(
    all_reduce: AllReduce, train: TrainStep, like: PipelineState, spread: Spread
) -> Any:
    """Returns the shapes of what codecs kept on these devices."""
    names, sizes = _mapped(all_reduce, train.axis_name, spread)
    gradients = train.gradients_form(like.params)

    def local() -> Any:
        return codec_states(gradients, all_reduce, names)

    return jax.eval_shape(_in_rows(local, axes(names), sizes))


def sum_owed(
    all_reduce: AllReduce,
    layout: Layout,
    axis_name: AxisName,
    before: Spread,
    states: Any,
) -> tuple[jax.Array, ...]:
    """Returns what those devices together have yet to send, by gradient."""
    names, sizes = _mapped(all_reduce, axis_name, before)

    def local(states: Any) -> tuple[jax.Array, ...]:
        return owed(all_reduce, layout, names, states)

    def one_row(states: Any) -> tuple[jax.Array, ...]:
        rows = _in_rows(local, axes(names), sizes)(states)
        pairs = zip(rows, layout.coded, strict=True)
        return tuple(x[: form.shape[0]] for x, form in pairs)  # all are the same

    return jax.jit(one_row)(states)


def _handed_on(
    all_reduce: AllReduce,
    layout: Layout,
    train: TrainStep,
    times: float,
    total: tuple[jax.Array, ...],
    states: Any,
) -> Any:
    """Returns the states, each device's with an equal share of `times total`."""
    config = train.config.at(train.executor.reduction_mesh)
    own, axis_name = P(config.axis_name), config.axis_name

    def local(states: Any, total: tuple[jax.Array, ...]) -> Any:
        share = jax.tree.map(lambda x: times / config.devices * x, total)
        return owing(all_reduce, layout, axis_name, states, share)

    return jax.jit(config.on_mesh(local, (own, P()), own))(states, total)


def _above_one(mesh: Mesh, names: tuple[str, ...]) -> dict[str, int]:
    return {name: mesh.shape[name] for name in names if mesh.shape[name] > 1}


def _mapped(
    all_reduce: AllReduce, axis_name: AxisName, spread: Spread
) -> tuple[AxisName, tuple[int, ...]]:
    """Axes and their extents; one axis where the algorithm does not tell them apart."""
    names, kept = tuple(map(Rows, axes(axis_name))), spread.kept or {}
    if all_reduce.axes is None:
        return names[0], (math.prod(kept.values()),)
    if not kept.keys() <= set(names):
        raise ValueError(
            f"`train` must have the axes {tuple(kept)} of the checkpoint, whose"
            f" all-reduce tells them apart; got {axis_name!r}. Name them alike."
        )
    return names, tuple(kept.get(name, 1) for name in names)


def _in_rows(
    local: Callable[..., Any], names: tuple[str, ...], sizes: tuple[int, ...]
) -> Callable[..., Any]:
    """`local`, as each device of axes of these sizes would run it on its own share.

    All on one device; of each array the shares lie one after another.
    """
    count = math.prod(sizes)

    def apart(x: jax.Array) -> jax.Array:
        return jnp.reshape(x, (*sizes, x.shape[0] // count, *x.shape[1:]))

    def together(x: jax.Array) -> jax.Array:
        return jnp.reshape(x, (-1, *x.shape[len(sizes) + 1 :]))

    def run(*args: Any) -> Any:
        mapped = local
        for name, size in zip(reversed(names), reversed(sizes), strict=True):
            mapped = jax.vmap(mapped, axis_name=name, axis_size=size)
        return jax.tree.map(together, mapped(*jax.tree.map(apart, args)))

    return run
