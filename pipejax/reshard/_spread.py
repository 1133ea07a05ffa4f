"""The devices over which the messages and residuals of a state are spread."""

import math
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from pipejax.collectives import AllReduce
from pipejax.mesh import AxisName, Rows, axes, inner_axes
from pipejax.train_step import PipelineState, TrainStep


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
        return all(rows_of(x, name, self) == rows_of(x, name, other) for x in phases)


def _split(leaf: jax.Array) -> dict[str, int]:
    """Returns the sizes of the axes over which the first axis of a leaf is split."""
    spec = leaf.sharding.spec  # type: ignore[attr-defined]
    names = axes(spec[0]) if spec and spec[0] else ()
    return _above_one(leaf.sharding.mesh, names)  # type: ignore[attr-defined]


def _above_one(mesh: Mesh, names: tuple[str, ...]) -> dict[str, int]:
    """Returns the sizes of the axes that have more than one device, by name."""
    return {name: mesh.shape[name] for name in names if mesh.shape[name] > 1}


def rows_of(
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
