"""Adds up the residuals of all old devices, and hands them on to the new ones.

Another number of devices is not at hand, so one device runs the algorithm for all old
devices: they are rows of `jax.vmap`, whose axes stand for the axes of their mesh.
"""

import collections
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from pipejax.collectives import AllReduce, Layout, Sharded, owed, owing
from pipejax.mesh import axes, on_mesh
from pipejax.message import Message, layout_of, on_shards_of
from pipejax.train_step import PipelineState, TrainStep

from ._spread import Spread, rows_of


def initial_states(
    all_reduce: AllReduce, train: TrainStep, like: PipelineState, spread: Spread
) -> Any:
    """Returns the shapes of the codec states on the devices of `spread`."""
    names, sizes = rows_of(all_reduce, train.axis_name, spread)
    own, layout = _of_one_device(all_reduce, train.gradients_form(like), spread)

    def local() -> Any:
        return own.init(layout, names)

    shapes = jax.eval_shape(_in_rows(local, axes(names), sizes))
    places = math.prod(spread.inner.values())
    return jax.tree.map(
        lambda x: x.update(shape=(places * x.shape[0], *x.shape[1:])), shapes
    )


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
    names, sizes = rows_of(all_reduce, train.axis_name, before)
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


def handed_on(
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
