"""Logs what codecs of low rank make of the arrays that a device sends."""

import logging
import math
from collections.abc import Sequence
from typing import cast

import jax
from jax.sharding import PartitionSpec as P

from pipejax._core.executors import StepConfig
from pipejax._core.message import Message
from pipejax._internal.ravel import Shapes
from pipejax._internal.shards import shard_form
from pipejax.codecs import Linear

_MUCH = 0.25
_log = logging.getLogger(__name__)


def log_ranks(phases: Sequence[StepConfig], message: Message) -> None:
    """Logs a warning if a codec does something else than was probably meant.

    `message` has the shapes of the gradients of one device or group.
    """
    config = phases[-1]
    shapes = _sent_by_device(config, message)
    at_once, count = config.step.settings.at_once, sum(map(math.prod, shapes))
    codecs = [codec for each in phases for codec in each.all_reduce.codecs]
    for codec in (*codecs, at_once):
        layers = getattr(codec, "layers", None)
        if layers is not None and all(shape[:1] != (layers,) for shape in shapes):
            _log.warning(
                "`layers` of a codec is %d, which is the length of the first axis of no"
                " array that a device sends: %.200s. All layers share its rank",
                layers,
                sorted({*shapes}),
            )
    if at_once is None or not count:
        return
    # Matrices that a low rank does not make smaller are exchanged whole.
    sizes = cast(Linear, at_once.of(shapes)).round_sizes(count)
    share = sum(sizes) / count
    if share > _MUCH:
        _log.warning(
            "`at_once` exchanges %.0f %% of the elements of the gradients in the step"
            " that computes them, where nothing hides it. Choose a lower rank; small"
            " matrices are exchanged whole",
            100 * share,
        )


def _sent_by_device(config: StepConfig, message: Message) -> Shapes:
    leaves = jax.tree.leaves(message.gradients)
    specs, sizes = message.shards.params or (P(),) * len(leaves), config.mesh.shape
    pairs = zip(leaves, specs, strict=True)
    return tuple(shard_form(leaf, spec, sizes).shape for leaf, spec in pairs)
