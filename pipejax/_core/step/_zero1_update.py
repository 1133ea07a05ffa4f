"""Runs a sharded optimizer's update on pieces, between the halves of an exchange."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from pipejax._core.message import Message, Reduced, Valid, layout_of, message_of
from pipejax._core.partitioned import NotElementwiseError, Program, on_partitions
from pipejax._core.prediction import Kind, Mean, Slopes, anchored
from pipejax._internal.shards import UNSHARDED
from pipejax._internal.structures import select
from pipejax._internal.types import Specs, Tree
from pipejax.collectives import Summands

from ._part import decided
from ._partition import (
    Partition,
    exact_specs,
    param_specs,
    spec_leaves,
    split_of,
)
from ._prediction import KindOf, update_of
from ._state import Trainable
from ._step import Settings
from ._update import advanced
from ._zero1_gather import difference, gathered_dtype


class Between(NamedTuple):
    """The result of the update, between the two halves of an exchange.

    Attributes:
      learned: Pieces of parameters, optimizer state and mean after the update.
      anchor: Pieces of the parameters to gather, or of their differences to those that
        are gathered already, for a codec. `None` once they are.
      codes: Pieces of the slopes to gather, or `None`.
      steepest: Bounds of the slopes, or `None`.
      finite: Whether all reduced gradients and changes are finite.
      squares: As in `Reduced`.
    """

    learned: Trainable
    anchor: optax.Params | None
    codes: Any
    steepest: Any
    finite: jax.Array
    squares: jax.Array
    changes: Tree
    passengers: Any


def needs_slopes(kind: Kind, partition: Partition) -> bool:
    """Returns whether the slopes of an update depend on what is split over the data."""
    if kind.name == "mixing":
        return False
    read = jax.tree.leaves(kind.opt_state)
    data_axes = zip(read, partition.opt_state_axes, strict=True)
    split = any(used and cut is not None for used, cut in data_axes)
    return kind.name != "linear" or kind.params or split


def sends_slopes(slopes: Slopes | None, behind: int) -> bool:
    """Returns whether devices gather slopes for this number of messages."""
    return slopes is not None and len(slopes.codes) == behind


def program_of(
    settings: Settings,
    kind_of: KindOf,
    trainable: Trainable,
    message: Message,
    behind: int,
    partition: Partition,
) -> Program:
    """Returns what a device does between the two halves of an exchange.

    `behind` is the number of messages that will be in flight after the update. Raises a
    `NotElementwiseError` if the update needs more than pieces and sums.
    """
    params, mean = trainable.whole_params, trainable.mean
    gradients, _ = param_specs(message.shards, settings.axis_name)
    sums = layout_of(message).sums()
    flag: Any = jax.ShapeDtypeStruct((), jnp.bool_)
    means = specs_of_means = None
    if mean is not None:
        means, specs_of_means = jax.eval_shape(lambda x: x, mean), means_of(None)
        if mean.gradients is not None:
            # A device has a piece of the mean. The update is traced on the whole.
            whole = jax.tree.map(
                lambda w, m: None if m is None else w.update(dtype=m.dtype),
                params,
                mean.gradients,
            )
            means = means._replace(gradients=whole)
            specs_of_means = means_of(gradients)
    held = specs_of_held = None
    if settings.gather_codec is not None:
        specs_of_held = partition.params
        held = jax.tree.map(
            lambda x: x.update(dtype=gathered_dtype(settings, x)), params
        )
    forms = (
        Summands(sums.coded, sums.exact),
        (
            Trainable(params, partition.whole_opt_state, means, held),
            Valid(flag, (flag,) * behind),
        ),
    )
    specs = (
        (gradients, exact_specs(message)),
        (
            Trainable(
                partition.params, partition.opt_state, specs_of_means, specs_of_held
            ),
            (P(), [P()] * behind),
        ),
    )
    sends = sends_slopes(trainable.slopes, behind)

    def between(sums: Any, rest: Any) -> Between:
        total = message_of(Summands(*sums), message)._replace(shards=UNSHARDED)
        learned, valid = rest
        return _between(
            settings, kind_of, learned, total, valid, partition, sends=sends
        )

    # `specs` has the structure of `forms`, leaf by leaf.
    pairs = zip(spec_leaves(specs), jax.tree.leaves(forms), strict=True)
    splits = [split_of(spec, len(form.shape)) for spec, form in pairs]
    return on_partitions(between, forms, splits, partition.devices)


def _between(
    settings: Settings,
    kind_of: KindOf,
    learned: Trainable,
    total: Message,
    valid: Valid,
    partition: Partition,
    *,
    sends: bool,
) -> Between:
    """Updates whole parameters and optimizer state by a summed message.

    Devices run this function on their pieces.
    """
    held, learned = learned.gathered, learned._replace(gathered=None)
    reduced = Reduced.of(total, valid.message, on_partitions=True)
    applies = decided(reduced, skip_nonfinite=settings.skip_nonfinite).applies
    # The update is computed and then selected: a branch could not hold its sums.
    new = advanced(settings.tx, learned, total, partition.data)
    learned = select(applies, new, learned)
    params, mean = learned.params, learned.mean
    anchor, slopes = params, None
    kind = kind_of(params, len(valid.behind), partition.data)
    # Where slopes depend on what is split and are not sent, as in a drain, the
    # parameters are gathered as they are.
    anchors = sends or (kind and not needs_slopes(kind, partition))
    if kind is not None and mean is not None and anchors:
        args = kind, update_of(settings), params, learned.opt_state, mean
        anchor, slopes = anchored(*args, valid.behind, settings.slope_dtype)
    sent = jax.tree.map(lambda x: x.astype(gathered_dtype(settings, x)), anchor)
    if held is not None:
        sent = jax.tree.map(difference, sent, held)
    return Between(
        learned=learned,
        anchor=sent,
        codes=None if slopes is None else slopes.codes,
        steepest=None if slopes is None else slopes.steepest,
        finite=reduced.finite,
        squares=reduced.squares,
        changes=total.changes,
        passengers=total.passengers,
    )


def after_update(program: Program, partition: Partition) -> tuple[P, ...]:
    """Returns how an update leaves the optimizer state, as a spec for each leaf.

    Raises a `NotElementwiseError` if it would split a parameter further.
    """
    at = jax.tree.unflatten(program.tree, range(program.tree.num_leaves))
    params = jax.tree_util.tree_leaves_with_path(at.learned.params)
    for (path, place), spec in zip(params, partition.params, strict=True):
        if partition.kept(spec, program.splits[place]) != spec:
            raise NotElementwiseError(
                f"update of params{jax.tree_util.keystr(path)} by arrays split apart"
            )
    leaves = jax.tree.leaves(at.learned.opt_state)
    pairs = zip(spec_leaves(partition.opt_state), leaves, strict=True)
    return tuple(partition.kept(spec, program.splits[place]) for spec, place in pairs)


def to_gather(
    program: Program, found: Between, partition: Partition
) -> list[jax.Array]:
    """Returns this device's pieces of parameters and slopes, for all to gather.

    What follows from numbers alone, such as the slopes of a frozen parameter, is whole
    on every device.
    """
    numbers = jax.tree.unflatten(program.tree, range(program.tree.num_leaves))
    at = [*jax.tree.leaves(numbers.anchor), *jax.tree.leaves(numbers.codes)]
    arrays = [*jax.tree.leaves(found.anchor), *jax.tree.leaves(found.codes)]
    specs = partition.params * (len(arrays) // len(partition.params))

    def piece(number: int, x: jax.Array, spec: P) -> jax.Array:
        wanted = partition.devices.divides(split_of(spec, x.ndim))
        if program.splits[number] == wanted:
            return x
        assert not any(program.splits[number])
        return partition.devices.piece(x, wanted)

    return list(map(piece, at, arrays, specs))


def means_of(specs: Specs) -> Specs:
    """Returns the specs of a mean whose gradients are split by `specs`."""
    whole: Any = P()
    return Mean(specs, whole, whole)
