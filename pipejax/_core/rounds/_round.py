r"""A round of local steps, as pure functions of one group.

Group i has parameters `theta_i` and an inner optimizer of its own. All groups have the
same anchor a. Both are cut into V chunks. A round has H steps, and V of them have a
chunk beside them. At the beginning of such a step, group i takes its difference in this
chunk,

$$D_i = a - \theta_i$$

which is averaged over groups beside the step. At its end, the outer optimizer u applies
the mean to this chunk of the anchor, and the group moves to where the others are, but
keeps the progress of the step:

$$a' = a - u(1/p \sum_i D_i)$$

$$\theta_i <- \theta_i + (a' - (a - D_i))$$

Hence no chunk is older than one step when it arrives, however long a round is.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import ArrayLike

from pipejax._core.message import (
    Exchange,
    InFlight,
    Mark,
    Message,
    Passengers,
    Reduced,
    marked,
    valid_at_once,
)
from pipejax._core.step import Common, Inputs, Step, StepInfo, apply
from pipejax._internal.keys import as_numbers
from pipejax._internal.shards import Shards
from pipejax._internal.structures import paths
from pipejax._internal.types import CodecStates, ModelState
from pipejax.collectives import AllReduce

from ._change import change
from ._flat import Chunk
from ._form import Form
from ._state import RoundPassengers


class ChunkState(NamedTuple):
    """The state of one chunk, which its exchange reads and replaces.

    Attributes:
      anchor: The chunk of the anchor.
      outer: The state of the outer optimizer for this chunk.
      codec_states: What the codecs keep of this chunk.
    """

    anchor: Chunk
    outer: optax.OptState
    codec_states: CodecStates


def inner_step(
    step: Step, local: Common, inputs: Inputs
) -> tuple[Common, StepInfo, Message]:
    """Takes a step of one group alone, with its own gradient."""
    message, computed = step.compute(local, _nothing_in_flight(), inputs)
    reduced = Reduced.of(message, jnp.array(True))
    local, info = apply(step.settings, local, computed, reduced, alone=True)
    return local, info, message


def synchronous_step(
    step: Step, local: Common, inputs: Inputs, all_reduce: AllReduce, mark: Mark
) -> tuple[Common, StepInfo, Message, Reduced]:
    """Takes a step of all groups together, with the mean of their gradients."""
    message, computed = step.compute(local, _nothing_in_flight(), inputs)

    def of(message: Message) -> Exchange:
        return step.exchange(None, message, valid_at_once(), all_reduce)

    exchange = marked(of, message, mark, step.settings.axis_name)
    reduced, _ = exchange.run({})
    local, info = apply(step.settings, local, computed, reduced)
    return local, info, message, reduced


def _nothing_in_flight() -> InFlight:
    return InFlight((), jnp.zeros(1, jnp.int32), {})


def difference(
    form: Form, anchor: Chunk, params: optax.Params, number: ArrayLike
) -> Chunk:
    """Returns the anchor minus the parameters of a group, in one chunk."""
    return change(form.sliced(params, number), anchor)


def arrived(
    outer_tx: optax.GradientTransformation,
    state: ChunkState,
    sent: Chunk,
    reduced: Reduced,
    groups: int,
    keep: jax.Array,
    trained: Chunk | None = None,
) -> tuple[ChunkState, Chunk]:
    """Applies the mean of a chunk to the anchor.

    A chunk that is not finite is left out by all groups alike: it moves nothing, and
    its difference stays for the next round. Elements that are not trained stay as they
    are, also if a codec decodes their zeros to other numbers.

    Args:
      outer_tx: The outer optimizer.
      state: The state of the chunk.
      sent: The difference of this group.
      reduced: The sum over groups.
      groups: The number of groups.
      keep: Whether the chunk is not left out.
      trained: Which elements are trained; `None` if all of them are.

    Returns:
      The state of the chunk, with the codec states that it had, and the correction,
      which the group adds to its parameters.
    """
    before = state.anchor
    # Sums of float16 come in float32.
    mean = jax.tree.map(
        lambda x, b: (x / groups).astype(b.dtype), reduced.sum.gradients, before
    )
    updates, outer = outer_tx.update(mean, state.outer, before)
    moves: Any = trained or dict.fromkeys(before, True)
    after = jax.tree.map(
        lambda a, b, m: jnp.where(keep & m, a, b),
        optax.apply_updates(before, updates),
        before,
        moves,
    )
    # The parameters of the group from which this chunk was sent.
    own = jax.tree.map(jnp.subtract, before, sent)
    correction = jax.tree.map(lambda x: jnp.where(keep, x, 0), change(own, after))
    outer = jax.tree.map(lambda a, b: jnp.where(keep, a, b), outer, state.outer)
    due = state._replace(anchor=after, outer=outer)
    # Otherwise, XLA computes the correction again for each array that it moves, and
    # keeps all that it is made of.
    return as_numbers(lax.optimization_barrier, (due, correction))


def refused_after(refused: jax.Array, reduced: Reduced) -> jax.Array:
    """Returns the number of chunks that were left out, after one more has arrived."""
    return refused + (~reduced.finite).astype(jnp.int32)


def message_of(chunk: Chunk, sent: RoundPassengers | None, shards: Shards) -> Message:
    """Returns the message of a chunk, with what travels with it.

    `shards` say how the devices of a group divide the chunk. The weight of the report
    travels as a number like any other: whether a chunk counts does not depend on it.
    """
    if sent is None:
        return Message(chunk, shards=shards)
    report = sent.report
    plain = jax.tree.structure(report.names[1:])
    report = dataclasses.replace(report, weighted=False, metrics_form=plain)
    return Message(chunk, sent.changes, report, shards)


def reporting(before: Passengers, message: Message) -> Passengers:
    """Returns the report of a round with what one more step reports."""
    check_report(before, message)
    values = before.values + message.passengers.values
    return dataclasses.replace(before, values=values)


def check_changes(form: Form, model_state: ModelState, message: Message) -> None:
    """Raises a `ValueError` unless rounds average exactly what changes of the state.

    Without the check, a leaf that does not change would be sent, and if it is infinite,
    the change of every leaf would become NaN.
    """
    averages = jax.tree_util.tree_leaves_with_path(form.averages(model_state))
    there = {path for path, averaged in averages if averaged}
    changed = paths(message.changes)
    if differing := changed ^ there:
        leaf = min(differing, key=jax.tree_util.keystr)
        now = "changes" if leaf in changed else "returns unchanged"
        was = "unchanged" if leaf in changed else "one that may change"
        raise ValueError(
            "`batch` must show `train.init` the model state that `loss_fn` changes: the"
            f" loss {now} `model_state{jax.tree_util.keystr(leaf)}`, and the state has"
            f" it as {was}. Give `batch` to the `train.init` or `train.abstract_state`"
            " that made it. To go on from a state, drain it, and call"
            " `train.init(state.params, model_state=state.model_state, batch=batch)`."
        )


def check_report(before: Passengers, message: Message) -> None:
    """Raises a `ValueError` if a state has no room for what a step reports."""
    if message.passengers.names != before.names:
        raise ValueError(
            "`batch` must be given to `train.init` when `loss_fn` returns metrics or a"
            f" weight; got {message.passengers.names[1:]} for which the state has no"
            " room. Call `train.init(params, ..., batch=batch)`, with arrays or their"
            " shapes, jax.ShapeDtypeStruct."
        )
