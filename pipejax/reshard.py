r"""Moves a train state from p devices to another number of devices, p'.

Parameters and optimizer state are replicated and stay as they are. This module converts
what differs between devices:

- Messages in flight, and deviations. Each new device gets the mean over the old
  devices, so that the mean over the new devices is the same.
- Residuals of error feedback, `e_i` on device i. The new devices get equal shares of

  $$p'/p \sum_i e_i$$

  When residuals are sent, they change a mean gradient by their sum divided by the
  number of devices. This quotient is the same on p' devices as on p devices.
- Gradients, loss and metrics in flight, and residuals, if the loss function returns
  weights W. The mean gradient is then `sum(W g) / sum(W)`, and the sum of a batch's
  weights does not depend on the number of devices. The new devices therefore get equal
  shares of the sum over the old devices.
- Keys and warm starts of codecs. They start again from their initial values.

During the conversion, every new device holds the values of all old devices.

The messages in flight show whether the loss function returns weights. At width 1 there
are no messages in flight, and residuals are converted as if there were no weights.
"""

import collections
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from .collectives import AllReduce, Layout, Sharded
from .collectives._residuals import owed, owing
from .mesh import AxisName, Rows, axes, inner_axes, on_mesh
from .message import InFlight, Message, layout_of, on_shards_of
from .train_step import PipelineState, TrainStep, in_flight_shardings


class Spread(NamedTuple):
    """The devices over which the leaves of `in_flight` are spread.

    Attributes:
      devices: Number of devices, or groups, that share the data.
      kept: Sizes of the data's axes on the mesh that holds the codec states, by name
        and in order, without axes of size 1. `None` if there are no codec states.
      inner: Sizes of the inner axes of this mesh, along which each device has codec
        states of its own shards, by name and without axes of size 1. Empty if there are
        no codec states.
    """

    devices: int
    kept: dict[str, int] | None
    inner: dict[str, int] = {}  # noqa: RUF012 - never changed

    @classmethod
    def of(cls, state: PipelineState) -> "Spread":
        """Returns the spread of a state that holds arrays, not only shapes."""
        filled = state.in_flight.filled
        states = [x for x in jax.tree.leaves(state.in_flight.codec_states) if x.size]
        if not states:
            return cls(filled.shape[0], None)
        every, data = _split(states[0]), _split(filled)
        inner = {name: size for name, size in every.items() if name not in data}
        # Beside accelerators, the states of codecs lie on a mesh of CPUs.
        inner = inner if state.shards else {}
        kept = {name: size for name, size in every.items() if name not in inner}
        return cls(filled.shape[0], kept, inner)

    @classmethod
    def now(cls, train: TrainStep, like: PipelineState) -> "Spread":
        """Returns the spread of the states that `train` makes.

        Args:
          train: The train step.
          like: A state of `train`, or its shapes.
        """
        devices = train.config.devices
        if not jax.tree.leaves(like.in_flight.codec_states):
            return cls(devices, None)
        mesh = train.executor.reduction_mesh
        inner = inner_axes(mesh, train.axis_name) if like.shards else ()
        kept = _above_one(mesh, axes(train.axis_name))
        return cls(devices, kept, _above_one(mesh, inner))

    def same_as(self, other: "Spread", train: TrainStep) -> bool:
        """Returns whether leaves have the same layout on both spreads.

        Axis names do not matter if the all-reduce treats all axes as one.

        Args:
          other: The spread of the states that `train` makes.
          train: The train step whose all-reduces keep codec states.

        Raises:
          ValueError: If the codec states are those of other shards.
        """
        if self.inner != other.inner:
            raise ValueError(
                f"`train` must have the inner axes {self.inner} of the checkpoint,"
                " because its codecs keep states of the shards of every device; got"
                f" {other.inner}. Restore it on a mesh with these axes, drain it, and"
                " go on from `train.init(state.params, opt_state=state.opt_state)` of"
                " the other train step, which loses what the codecs keep."
            )
        if self.devices != other.devices or None in (self.kept, other.kept):
            return self == other
        phases, name = train.schedule.phases, train.axis_name
        return all(_mapped(x, name, self) == _mapped(x, name, other) for x in phases)


def _split(leaf: jax.Array) -> dict[str, int]:
    """Returns the sizes of the axes over which the first axis of a leaf is split."""
    spec = leaf.sharding.spec  # type: ignore[attr-defined]
    names = axes(spec[0]) if spec and spec[0] else ()
    return _above_one(leaf.sharding.mesh, names)  # type: ignore[attr-defined]


def shapes_on(train: TrainStep, like: PipelineState, spread: Spread) -> PipelineState:
    """Returns the shapes that a state of `train` would have on other devices.

    Args:
      train: The train step.
      like: A state of `train`, or its shapes.
      spread: The other devices.
    """
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
    """Moves a state to the devices of a train step.

    Args:
      train: The train step that continues from the state.
      state: A state whose `in_flight` has the parts of all old devices, replicated on
        each new device. Everything else is already a state of `train`.
      before: The old devices.

    Returns:
      The state on the devices of `train`. Replicated leaves are unchanged.
    """
    states, in_flight = train.codec_states(state), state.in_flight
    form, now = train.gradients_form(state), train.config.devices
    weighted = any(message.weight is not None for message in in_flight.pending)
    times = 1.0 if weighted else now / before.devices
    for all_reduce in train.schedule.phases if before.kept is not None else ():
        old = state.in_flight.codec_states
        total = sum_owed(all_reduce, form, train, before, old)
        states = _handed_on(all_reduce, form, train, times, total, states)
    data = axes(train.axis_name)
    own = in_flight_shardings(in_flight, state.shards, train.config, data)

    def spread(in_flight: InFlight) -> InFlight:
        if before.devices == now:
            return in_flight
        return _shared_out(in_flight, before.devices, now)

    in_flight = in_flight._replace(codec_states={})
    in_flight = jax.jit(spread, out_shardings=own)(in_flight)
    return state._replace(in_flight=in_flight._replace(codec_states=states))


def _shared_out(in_flight: InFlight, before: int, now: int) -> InFlight:
    """Returns what is in flight for another number of devices, equal on all of them.

    Args:
      in_flight: The parts of the old devices, without codec states.
      before: Number of old devices.
      now: Number of new devices.
    """

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
        return message._replace(
            gradients=jax.tree.map(by, message.gradients),
            changes=jax.tree.map(mean, message.changes),
            passengers=jax.tree.map(by, message.passengers),
        )

    return in_flight._replace(
        pending=tuple(map(shared_out, in_flight.pending)),
        # This is the same on all devices. A mean is not used, because rounding could
        # make an integer one too small.
        filled=jnp.repeat(in_flight.filled[:1], now),
        deviation=jax.tree.map(mean, in_flight.deviation),
    )


def _init(
    all_reduce: AllReduce, train: TrainStep, like: PipelineState, spread: Spread
) -> Any:
    """Returns the shapes of the codec states on the devices of `spread`."""
    names, sizes = _mapped(all_reduce, train.axis_name, spread)
    own, layout = _of_one_device(all_reduce, train.gradients_form(like), spread)

    def local() -> Any:
        return own.init(layout, names)

    shapes = jax.eval_shape(_in_rows(local, axes(names), sizes))
    places = math.prod(spread.inner.values())
    return jax.tree.map(
        lambda x: x.update(shape=(places * x.shape[0], *x.shape[1:])), shapes
    )


def _of_one_device(
    all_reduce: AllReduce, form: Message, spread: Spread
) -> tuple[AllReduce, Layout]:
    """Returns the algorithm that a device runs, and the layout of what it sums.

    Args:
      all_reduce: The algorithm of the train step.
      form: Shapes of the gradients of a group.
      spread: The devices, each of which sums its own shards.
    """
    sharded, layout = on_shards_of(form, all_reduce), layout_of(form)
    if not isinstance(sharded, Sharded):
        return all_reduce, layout
    sizes = collections.defaultdict(lambda: 1, spread.inner)
    return sharded.of_one_device(sizes), sharded.shard(layout, sizes)


def sum_owed(
    all_reduce: AllReduce, form: Message, train: TrainStep, before: Spread, states: Any
) -> tuple[jax.Array, ...]:
    """Returns the sum of all residuals over the old devices.

    Args:
      all_reduce: The algorithm that keeps the residuals.
      form: Shapes of the gradients of a device or group.
      train: The train step that continues from the state.
      before: The old devices.
      states: Codec states of all old devices.

    Returns:
      One array for each gradient, in its shape.
    """
    names, sizes = _mapped(all_reduce, train.axis_name, before)
    own, layout = _of_one_device(all_reduce, form, before)

    def local(states: Any) -> tuple[jax.Array, ...]:
        return owed(own, layout, names, states)

    def one_row(states: Any) -> tuple[jax.Array, ...]:
        rows = _in_rows(local, axes(names), sizes)(states)
        pairs = zip(rows, layout.coded, strict=True)
        # All rows are the same.
        return tuple(x[: form.shape[0]] for x, form in pairs)

    if not before.inner:
        return jax.jit(one_row)(states)
    places = math.prod(before.inner.values())

    def by_place(x: jax.Array) -> jax.Array:
        """Puts the states of all devices at one place in their group together."""
        apart = x.reshape(
            -1, places, x.shape[0] // (places * math.prod(sizes)), *x.shape[1:]
        )
        return apart.swapaxes(0, 1).reshape(x.shape)

    each, specs = P(tuple(before.inner)), tuple(form.shards.params)
    program = on_mesh(
        one_row, train.executor.reduction_mesh, (each,), specs, tuple(before.inner)
    )
    return jax.jit(lambda states: program(jax.tree.map(by_place, states)))(states)


def _handed_on(
    all_reduce: AllReduce,
    form: Message,
    train: TrainStep,
    times: float,
    total: tuple[jax.Array, ...],
    states: Any,
) -> Any:
    """Returns codec states in which each device has an equal share of residuals.

    Args:
      all_reduce: The algorithm that will send the residuals.
      form: Shapes of the gradients of a device or group.
      train: The train step that continues from the state.
      times: Factor for `total`.
      total: Sum of the residuals over the old devices.
      states: Codec states of `train`, in which the residuals are replaced.
    """
    config = train.config.at(train.executor.reduction_mesh)
    own, axis_name = P(config.axis_name), config.axis_name
    sends, layout = on_shards_of(form, all_reduce), layout_of(form)

    def local(states: Any, total: tuple[jax.Array, ...]) -> Any:
        share = jax.tree.map(lambda x: times / config.devices * x, total)
        return owing(sends, layout, axis_name, states, share)

    return jax.jit(config.on_mesh(local, (own, P()), own))(states, total)


def _above_one(mesh: Mesh, names: tuple[str, ...]) -> dict[str, int]:
    """Returns the sizes of the axes that have more than one device, by name."""
    return {name: mesh.shape[name] for name in names if mesh.shape[name] > 1}


def _mapped(
    all_reduce: AllReduce, axis_name: AxisName, spread: Spread
) -> tuple[AxisName, tuple[int, ...]]:
    """Returns the `jax.vmap` axes that stand for the devices, and their sizes.

    If the algorithm treats all axes as one, there is a single axis.
    """
    names, kept = tuple(map(Rows, axes(axis_name))), spread.kept or {}
    if all_reduce.axes is None:
        return names[0], (math.prod(kept.values()),)
    if not kept.keys() <= set(names):
        raise ValueError(
            f"`train` must have the axes {tuple(kept)} of the checkpoint, because its"
            f" all-reduce tells these axes apart; got {axis_name!r}. Give the axes of"
            " the mesh the same names as in the checkpoint."
        )
    return names, tuple(kept.get(name, 1) for name in names)


def _in_rows(
    local: Callable[..., Any], names: tuple[str, ...], sizes: tuple[int, ...]
) -> Callable[..., Any]:
    """Returns a function that runs `local` for all devices, as rows of `jax.vmap`.

    The function runs on one device. The shares of the devices are concatenated along
    the first axis of every argument and result.

    Args:
      local: Function of the shares of one device.
      names: Names of the axes over which `local` has collectives.
      sizes: Number of devices along each axis.
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
