r"""Makes a step whose optimizer is sharded over devices (ZeRO-1).

An all-reduce is a reduce-scatter and an all-gather. With a sharded optimizer, the
update runs between the two:

1. The reduce-scatter leaves each device with its piece of the mean gradient.
2. The device updates its pieces of parameters and optimizer state.
3. The all-gather gives every device the new parameters.

The exchange sends the bytes of an all-reduce, while each device keeps and computes only
its share of the optimizer. At width K, all of the exchange needs nothing of the step
that it runs beside, and the recursion is that of the unsharded pipeline:

$$w_t = w_{t-1} - u(g_{t-K})$$

The update may need sums over whole gradients: whether all are finite, and the norm by
which they are clipped. A small all-reduce between the two halves carries these sums.

References:
  Rajbhandari et al., ZeRO, 2020, https://arxiv.org/abs/1910.02054
"""

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from pipejax._core.message import (
    Exchange,
    Message,
    Reduced,
    Valid,
    agreement,
    divided,
    layout_of,
    on_shards_of,
    summands,
)
from pipejax._core.partitioned import stages_of
from pipejax._core.prediction import CODE, Mean, Slopes, of_words, to_words, word_form
from pipejax._internal.shards import as_on_shards
from pipejax._internal.types import CodecStates, Leaf, Tree
from pipejax.collectives import (
    AllReduce,
    Local,
    ReduceScatterAllGather,
    Stages,
    Summands,
    on_first,
    on_own_shards,
    sets_by_axes,
)

from ._compute import compute
from ._frozen import without_frozen
from ._gradient import local_message
from ._partition import (
    Partition,
    check_partition,
    exact_specs,
    param_specs,
    split_of,
)
from ._prediction import KindOf, kinds
from ._replicated import replicated_step
from ._state import Trainable, data_specs
from ._step import Settings, Step
from ._update import apply
from ._zero1_gather import (
    forms,
    gather,
    gathered_dtype,
    moved,
    own_pieces,
    sent_dtype,
)
from ._zero1_layout import layout, layout_alone
from ._zero1_point import point
from ._zero1_update import (
    Between,
    after_update,
    means_of,
    needs_slopes,
    program_of,
    sends_slopes,
    to_gather,
)


def zero1_step(settings: Settings, devices: int) -> Step:
    """Returns the step in which devices keep and update pieces of the optimizer.

    A single device has all pieces, and takes the step that is not divided. What more
    devices would refuse is refused there, too.
    """
    kind_of = kinds(settings)
    if devices == 1:
        alone = functools.partial(layout_alone, settings, kind_of)
        return replicated_step(settings)._replace(layout=alone)
    begin = functools.partial(_empty_mean, settings, kind_of)
    at = functools.partial(point, settings, kind_of)
    return Step(
        settings=settings,
        layout=functools.partial(layout, settings, kind_of),
        init=functools.partial(_init, settings, kind_of),
        message=functools.partial(local_message, settings),
        compute=functools.partial(compute, settings, at, begin),
        exchange=functools.partial(_exchange, settings, kind_of),
        gather=functools.partial(gather, settings),
        apply=functools.partial(apply, settings),
    )


def _empty_mean(
    settings: Settings, kind_of: KindOf, trainable: Trainable, length: int
) -> Mean | None:
    """Returns the mean that predictions need before any is applied, or `None`.

    It has no gradients if devices find the slopes themselves.
    """
    params, partition = trainable.whole_params, Partition.of(settings, trainable)
    kind = kind_of(params, length, partition.data)
    if kind is None:
        return None
    trained = without_frozen(settings.tx, params)
    mean = Mean.empty(trained, settings.reduce_dtype)
    if kind.name == "linear" and not needs_slopes(kind, partition):
        return mean._replace(gradients=None)
    return mean


def _init(
    settings: Settings, kind_of: KindOf, whole: Trainable, length: int
) -> Trainable:
    """Returns this device's pieces, and what every device has whole."""
    whole = whole._replace(mean=_empty_mean(settings, kind_of, whole, length))
    partition = Partition.of(settings, whole)
    pieces = jax.tree.map(
        lambda x, spec: partition.devices.piece(x, split_of(spec, x.ndim)),
        whole,
        data_specs(whole, settings.axis_name),
    )
    params = whole.params
    slopes, kind = None, kind_of(params, length, partition.data)
    if kind is not None and needs_slopes(kind, partition):
        codes = jax.tree.map(
            lambda x: jnp.zeros(x.shape, _slope_dtype(settings, x)), params
        )
        steepest = jax.tree.map(lambda _: jnp.float32(0), params)
        slopes = Slopes((codes,) * length, (steepest,) * length)
    gathered = jax.tree.map(lambda x: x.astype(gathered_dtype(settings, x)), params)
    return pieces._replace(gathered=gathered, slopes=slopes)


def _exchange(
    settings: Settings,
    kind_of: KindOf,
    trainable: Trainable | None,
    message: Message,
    valid: Valid,
    all_reduce: AllReduce,
) -> Exchange:
    """Returns the exchange that updates the optimizer between its two halves."""
    assert trainable is not None
    name, shards, whole = settings.axis_name, trainable.shards, trainable.whole_params
    partition, behind = Partition.of(settings, trainable), len(valid.behind)
    # The update is planned for a single device of a group, which runs it on its shards.
    with as_on_shards() if shards else contextlib.nullcontext():
        program = program_of(settings, kind_of, trainable, message, behind, partition)
        check_partition(after_update(program, partition), partition)
    sizes = partition.devices.sizes
    halved, layout = on_shards_of(message, all_reduce), layout_of(message)
    if shards:
        halved, layout = halved.of_one_device(sizes), halved.shard(layout, sizes)
    sent_forms, times = forms(settings, whole, partition, sent_dtype), 1
    # Codes of 8 bits travel as 32-bit words beside the parameters, in the same
    # collective of each array.
    if sends := sends_slopes(trainable.slopes, behind):
        codes = [x.update(dtype=_slope_dtype(settings, x)) for x in sent_forms]
        sent_forms, times = [*sent_forms, *map(word_form, codes * behind)], 1 + behind
    gathering = ReduceScatterAllGather(
        all_reduce,
        shards.data_axes * times,
        gather_codec=settings.gather_codec,
        # Parameters alone, and not their slopes.
        gather_sets=sets_by_axes(partition.params_inner, sizes),
    )

    agree = agreement(message, valid.message, name)

    def weigh(value: Tree, states: CodecStates) -> tuple[Any, Any]:
        sums, (learned, valid, weight) = value
        if weight is not None and (states or all_reduce.narrow):  # as in `in_means`
            weight = agree().mean_weight
            sums = divided(sums, weight)
        return (sums, (learned, valid, weight)), states

    def enter(value: Tree, states: CodecStates) -> tuple[Any, Any]:
        sums, (*rest, weight) = value
        if weight is not None:
            sums = divided(sums, 1 / weight)
        return program.run(0, jax.tree.leaves((sums, rest))), states

    def leave(value: Tree, states: CodecStates) -> tuple[Any, Any]:
        found = program.result(value)
        sent = tuple(map(to_words, to_gather(program, found, partition)))
        return (sent, found._replace(anchor=None, codes=None)), states

    def end(value: Tree) -> Reduced:
        gathered, found = value
        structure, count = jax.tree.structure(trainable.params), len(shards.data_axes)
        anchor, *codes = (
            jax.tree.unflatten(structure, gathered[i : i + count])
            for i in range(0, len(gathered), count)
        )
        if settings.gather_codec is not None:
            anchor = jax.tree.map(moved, trainable.gathered, anchor)
        slopes = trainable.slopes
        if slopes is not None and sends:
            sent = jax.tree.map(of_words, tuple(codes), slopes.codes)
            slopes = Slopes(sent, found.steepest)
        return Reduced(
            sum=Message(None, found.changes, found.passengers, message.shards),
            valid=valid.message,
            finite=found.finite,
            squares=found.squares,
            updated=found.learned._replace(
                gathered=anchor, slopes=slopes, shards=trainable.shards
            ),
        )

    # The sums of the update, such as a norm, are stages between the two halves. All of
    # it is local work and collectives, which an executor interleaves like any exchange.
    stages = (
        on_first(halved.reduce_scatter(layout, name))
        + Stages((Local(enter),))
        + stages_of(program, partition.devices, silent=halved.silent)
        + Stages((Local(leave),))
        + on_first(gathering.all_gather(sent_forms, name))
    )
    held = None
    if settings.gather_codec is not None:  # the owners send differences to these
        held = own_pieces(settings, trainable, partition)
    learned = Trainable(trainable.params, trainable.opt_state, trainable.mean, held)
    weight = None if message.weight is None else jnp.float32(1)
    start = summands(message), (learned, valid, weight)
    if shards:
        specs = _specs(settings, message, start, sent_forms, partition)
        stages = on_own_shards(stages, *specs)
    stages = Stages((Local(weigh),)) + stages
    # The forward pass is a third of the compute and makes no gradients yet.
    early = 1 / 3 if settings.microbatches == 1 else 0.5
    stages = stages.guarded(lambda: agree().usable)
    return Exchange(start, stages, end, early)


def _slope_dtype(settings: Settings, leaf: Leaf) -> DTypeLike:
    return CODE if settings.slope_dtype == CODE else leaf.dtype


def _specs(
    settings: Settings,
    message: Message,
    start: Any,
    forms: Sequence[Any],
    partition: Partition,
) -> tuple[Any, Any]:
    """Returns how the values before and after an exchange are split over inner axes."""
    _, gradients = param_specs(message.shards, settings.axis_name)
    exact = exact_specs(message)
    whole: Any = P()
    structure = jax.tree.structure((message.changes, message.passengers))
    changes, passengers = jax.tree.unflatten(structure, exact)
    _, (learned, *others) = start
    params, mean = learned.params, learned.mean
    times = len(forms) // len(partition.params)
    inner = jax.tree.unflatten(jax.tree.structure(params), partition.params_inner)
    held = None if learned.gathered is None else inner
    means = None
    if mean is not None:
        structure = jax.tree.structure(mean.gradients)
        split = gradients if mean.gradients is not None else ()
        means = means_of(jax.tree.unflatten(structure, split))
    learned = Trainable(inner, partition.opt_state_inner, means)
    before = (
        Summands(gradients, exact),
        (learned._replace(gathered=held), *jax.tree.map(lambda _: whole, others)),
    )
    found: Any = Between(learned, None, None, whole, whole, whole, changes, passengers)
    return before, (partition.params_inner * times, found)
