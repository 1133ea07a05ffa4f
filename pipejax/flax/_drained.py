"""The check that no gradients are lost when a state is written back to a model."""

from pipejax import PipelineState
from pipejax._core.message import count


def check_drained(state: PipelineState) -> None:
    in_flight = count(state.in_flight)
    if in_flight:
        raise ValueError(
            f"`state` must have no gradients in flight, got {in_flight} computed and"
            " not yet applied. Apply them first: `state, _ = train.drain(state)`."
        )
