"""The check that nothing is lost when a state is written back to a model."""

from pipejax import LocalState, PipelineState
from pipejax._core.message import count


def check_drained(state: PipelineState | LocalState) -> None:
    """Raises a `ValueError` unless `train.drain` has returned the state."""
    if isinstance(state, LocalState):
        if steps := int(state.position.reported):
            raise ValueError(
                "`state` must have exchanged all that groups have changed, got one with"
                f" {steps} steps since the last report. Exchange their changes first:"
                " `state, _ = train.drain(state)`."
            )
        return
    in_flight = count(state.in_flight)
    if in_flight:
        raise ValueError(
            f"`state` must have no gradients in flight, got {in_flight} computed and"
            " not yet applied. Apply them first: `state, _ = train.drain(state)`."
        )
