"""The states of the codecs before the first step, as they lie on a mesh."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pipejax._core.message import Message, joined_states
from pipejax._core.message import codec_states as codec_states_of_device
from pipejax._core.step import PipelineState
from pipejax._internal.mesh import auto_mesh, axes, inner_axes
from pipejax._internal.shards import Shards
from pipejax._internal.types import CodecStates

from ._config import StepConfig


def codec_states(
    phases: Sequence[StepConfig],
    reduction_mesh: Mesh,
    state: PipelineState,
    *,
    abstract: bool = False,
) -> CodecStates:
    """Returns the codec states of all phases of a run together."""
    shards = Shards(state.shards.params, data_axes=state.shards.data_axes)
    late, at_once = phases[-1].empty_messages(
        state.trainable.whole_params, None, shards
    )

    def of(like: Message, phases: Sequence[StepConfig]) -> CodecStates:
        like = like._replace(passengers=None)
        states: CodecStates = {}
        # A warm-up has the all-reduce of the phase that follows it.
        for phase in {id(phase.all_reduce): phase for phase in phases}.values():
            states |= codec_states_of(phase.at(reduction_mesh), like, abstract=abstract)
        return states

    if at_once is None:
        return of(late, phases)
    return joined_states(
        of(late, phases), of(at_once, [phase.at_once for phase in phases])
    )


def check_codec_states(
    phases: Sequence[StepConfig], reduction_mesh: Mesh, state: PipelineState
) -> None:
    """Raises a `ValueError` if a state holds more than the codecs of a run keep.

    A codec itself refuses a state without what it keeps.
    """
    if found := state.in_flight.codec_states:
        wanted = codec_states(phases, reduction_mesh, state, abstract=True)
        check_none_unused(found, wanted)


def check_none_unused(found: CodecStates, wanted: CodecStates) -> None:
    """Raises a `ValueError` if no codec would read or pass on something it kept."""
    if unused := sorted(found.keys() - wanted.keys()):
        raise ValueError(
            "`state` must be of a train step with this `all_reduce`, whose codecs keep"
            f" {sorted(wanted) or 'nothing'}; got one with what a codec kept at"
            f" {unused[0]!r}, such as a residual, which would be lost. {_GO_ON}"
        )


_GO_ON = (
    "Drain it with the train step that made it, and go on from"
    " `train.init(state.params, opt_state=state.opt_state)` of this one."
)


def codec_states_of(
    config: StepConfig, like: Message, *, abstract: bool = False
) -> CodecStates:
    """Returns the states of all devices' codecs before the first message."""

    def local() -> CodecStates:
        return codec_states_of_device(like, config.sums_by, config.axis_name)

    program = config.on_mesh(local, (), P(config.axis_name))
    # Devices that sum their own shards also have their own states.
    inner = inner_axes(config.mesh, config.axis_name) if like.shards else ()
    every = (*axes(config.axis_name), *inner)
    own = P(every if len(every) > 1 else every[0])

    mesh = auto_mesh(config.mesh)  # as in `in_flight_shardings`

    def placed(shape: Any) -> jax.ShapeDtypeStruct:
        # JAX replicates arrays without elements.
        sharding = NamedSharding(mesh, own if shape.size else P())
        return shape.update(sharding=sharding)

    shapes = jax.tree.map(placed, jax.eval_shape(program))
    if abstract or not jax.tree.leaves(shapes):
        return shapes
    shardings = jax.tree.map(lambda shape: shape.sharding, shapes)
    return jax.jit(program, out_shardings=shardings)()
