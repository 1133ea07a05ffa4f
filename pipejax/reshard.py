"""What each device has for itself, handed on to another number of devices.

- gradients in flight: every device is given their mean as its own, so that the mean
  that arrives is the same
- what error feedback has yet to send, e: from p devices to p', each given an equal
  share of `p'/p sum e`, so that what it adds to a mean in the end, `sum e / p`, is the
  same
- keys and warm starts of codecs begin anew: what they are does not change what is sent
  on average
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from .buckets import Buckets
from .collectives import AllReduce
from .collectives._residuals import owed, owing
from .mesh import AxisName, Rows, axes
from .message import MessageForm
from .train_step import PipelineState, TrainStep


class Spread(NamedTuple):
    """Over how many devices something lies.

    Attributes:
      devices: that share the data.
      axes: of the mesh on which codecs keep what they keep, by name; none without any.
    """

    devices: int
    axes: dict[str, int]

    @classmethod
    def of(cls, state: PipelineState) -> "Spread":
        """That of a state, not of its shapes."""
        kept = jax.tree.leaves(state.in_flight.codec_states)
        mesh = kept[0].sharding.mesh.shape if kept else {}
        return cls(state.in_flight.filled.shape[0], dict(mesh))

    @classmethod
    def now(cls, train: TrainStep, like: PipelineState) -> "Spread":
        """That of the states of `train`, or of their shapes."""
        kept = jax.tree.leaves(like.in_flight.codec_states)
        mesh = train.executor.reduction_mesh.shape if kept else {}
        return cls(train.setting.devices, dict(mesh))


def shapes_on(train: TrainStep, like: PipelineState, spread: Spread) -> PipelineState:
    """The shapes of a state of `train`, were its devices these."""
    now = train.setting.devices

    def resized(leaf: Any) -> jax.ShapeDtypeStruct:
        size = leaf.shape[0] // now * spread.devices
        return jax.ShapeDtypeStruct((size, *leaf.shape[1:]), leaf.dtype)

    form = train.message_form(like)
    states: dict[str, Any] = {name: {} for name, _ in form.layouts}
    for all_reduce in train.schedule.phases:
        for name, more in _init(all_reduce, form, train.axis_name, spread).items():
            states[name] |= more
    in_flight = jax.tree.map(resized, like.in_flight._replace(codec_states={}))
    return like._replace(in_flight=in_flight._replace(codec_states=states))


def reshard(train: TrainStep, state: PipelineState, before: Spread) -> PipelineState:
    """The state on the devices of `train`, everything replicated as it was.

    Args:
      train: whose state this is to be.
      state: whose `in_flight` is that of other devices, all of it on each.
      before: of those.
    """
    states, form = train.codec_states(state), train.message_form(state)
    for all_reduce in train.schedule.phases if before.axes else ():
        old = state.in_flight.codec_states
        sums = sums_owed(all_reduce, form, train.axis_name, before, old)
        states = _handed_on(all_reduce, form, train, before.devices, sums, states)
    in_flight, now = state.in_flight._replace(codec_states={}), train.setting.devices
    if now != before.devices:
        in_flight = jax.tree.map(lambda x: _shared(x, before.devices, now), in_flight)
    own = NamedSharding(train.mesh, P(train.axis_name))
    in_flight = jax.device_put(in_flight, own)._replace(codec_states=states)
    return state._replace(in_flight=in_flight)


def _init(
    all_reduce: AllReduce, form: MessageForm, axis_name: AxisName, spread: Spread
) -> Any:
    """Shapes of what codecs kept on these devices."""
    names, sizes = _mapped(all_reduce, axis_name, spread)

    def local() -> Any:
        return {k: x.init() for k, x in form.reductions(all_reduce, names).items()}

    return jax.eval_shape(_in_rows(local, axes(names), sizes))


def sums_owed(
    all_reduce: AllReduce,
    form: MessageForm,
    axis_name: AxisName,
    before: Spread,
    states: Any,
) -> Buckets:
    """What those devices together have yet to send: `{dtype: [n]}`, float32."""
    names, sizes = _mapped(all_reduce, axis_name, before)

    def local(states: Any) -> Buckets:
        return {k: owed(all_reduce, x, names, states[k]) for k, x in form.layouts}

    rows = jax.jit(_in_rows(local, axes(names), sizes))(states)
    return {k: rows[k][: x.coded] for k, x in form.layouts}  # all rows are the same


def _handed_on(
    all_reduce: AllReduce,
    form: MessageForm,
    train: TrainStep,
    before: int,
    sums: Buckets,
    states: Any,
) -> Any:
    """The states, each device's with an equal share of that to be sent."""
    setting = train.setting.at(train.executor.reduction_mesh)
    own, axis_name = P(setting.axis_name), setting.axis_name
    scale = train.setting.devices / (before * setting.devices)

    def local(states: Any, sums: Buckets) -> Any:
        return {
            k: owing(all_reduce, x, axis_name, states[k], scale * sums[k])
            for k, x in form.layouts
        }

    return jax.jit(setting.on_mesh(local, (own, P()), own))(states, sums)


def _shared(leaf: jax.Array, before: int, now: int) -> np.ndarray:
    """The mean of each device's own, for each."""
    mean = np.mean(np.reshape(leaf, (before, -1)), axis=0).astype(leaf.dtype)
    return np.tile(mean, now)


def _mapped(
    all_reduce: AllReduce, axis_name: AxisName, spread: Spread
) -> tuple[AxisName, tuple[int, ...]]:
    """Axes of these sizes; as one where the algorithm does not tell them apart."""
    names = tuple(map(Rows, axes(axis_name)))
    sizes = tuple(spread.axes.get(name, 1) for name in names)
    if all_reduce.axes is None:
        return names[0], (math.prod(sizes),)
    return names, sizes


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
