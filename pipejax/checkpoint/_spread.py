"""The devices over which messages and codec states are spread."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pipejax._core.executors import StepConfig, codec_states
from pipejax._core.message import messages_of
from pipejax._internal.mesh import axes, inner_axes
from pipejax._internal.types import CodecStates
from pipejax.collectives import AllReduce
from pipejax.train_step import LocalState, PipelineState, TrainStep

Axes = list[list[Any]]
"""Names and sizes of mesh axes with more than one device, in order."""


class Spread(NamedTuple):
    """Over which devices the leaves of `in_flight` are spread, as JSON holds it."""

    devices: int  # or groups, that share the data
    inner: Axes  # the inner axes of the mesh, over which each group shards its model
    split: list[list[list[str]]]  # by parameter, the inner axes that split each axis
    codecs: Axes | None  # the axes over which codec states are spread
    messages: int  # fewer than devices if those of a host have the same

    @classmethod
    def of(cls, state: PipelineState) -> "Spread":
        shards = state.shards
        filled: Any = state.in_flight.filled  # or its shape
        mesh = filled.sharding.mesh.shape if shards.inner else {}
        inner, states = _sizes(mesh, shards.inner), state.in_flight.codec_states
        split, codecs = _split(shards.params), _of_codecs(states)
        return cls(filled.shape[0], inner, split, codecs, messages_of(state.in_flight))

    @classmethod
    def now(cls, train: TrainStep, like: PipelineState) -> "Spread":
        filled: Any = jax.ShapeDtypeStruct(
            like.in_flight.filled.shape, "int32", sharding=train.config.data
        )
        states = codec_states(
            train.phases, train.executor.reduction_mesh, like, abstract=True
        )
        in_flight = like.in_flight._replace(filled=filled, codec_states=states)
        return cls.of(like._replace(in_flight=in_flight))

    @classmethod
    def of_rounds(cls, state: LocalState) -> "Spread":
        """Returns the spread of a state of local steps, or of its shapes."""
        form, states = state.shared.form, state.own.codec_states
        inner = _sizes(form.mesh.shape, inner_axes(form.mesh, form.axis_name))
        split, codecs = _split(form.specs), _of_codecs(states)
        return cls(state.groups, inner, split, codecs, state.groups)

    def moves_to(self, config: StepConfig) -> bool:
        """Returns whether other devices, groups or hosts get the messages."""
        return (self.devices, self.messages) != (config.devices, config.messages)

    def same_shards(self, other: "Spread") -> bool:
        return self[:3] == other[:3]

    def same_codecs(self, other: "Spread", *algorithms: AllReduce) -> bool:
        """Returns whether codec states of one spread can be those of the other."""
        # If only one of the spreads has codec states, the codecs differ, which shows
        # when the states are compared.
        if None in (self.codecs, other.codecs) or not self.same_shards(other):
            return self.same_shards(other)
        if any(x.axes is not None for x in algorithms):
            return self.codecs == other.codecs
        # Axis names do not matter where the all-reduce treats all axes of the data as
        # one.
        places = (math.prod(n for _, n in x.codecs or ()) for x in (self, other))
        return len({*places}) == 1


def _split(specs: Sequence[P]) -> list[list[list[str]]]:
    return [[list(axes(entry or ())) for entry in spec] for spec in specs]


def _of_codecs(states: CodecStates) -> Axes | None:
    """Returns the axes over which codec states are spread, `None` without any."""
    # Beside accelerators, codec states may lie on another mesh, one of CPUs.
    kept = [leaf for leaf in jax.tree.leaves(states) if leaf.size]
    if not kept:
        return None
    names = _along_first(kept[0])
    return _sizes(kept[0].sharding.mesh.shape if names else {}, names)


def _along_first(leaf: Any) -> tuple[str, ...]:
    """Returns the mesh axes that split the first axis of an array."""
    spec = leaf.sharding.spec if isinstance(leaf.sharding, NamedSharding) else ()
    return axes(spec[0]) if spec and spec[0] else ()


def _sizes(sizes: Mapping[str, int], names: tuple[str, ...]) -> Axes:
    return [[name, sizes[name]] for name in names if sizes[name] > 1]
