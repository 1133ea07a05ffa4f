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
from pipejax.codecs import Codec, Linear

_MUCH = 0.25
_log = logging.getLogger(__name__)


def log_ranks(phases: Sequence[StepConfig], message: Message) -> None:
    """Logs a warning of each codec whose rank or layers do not suit the arrays.

    `message` has the shapes of the gradients of one device or group.
    """
    shapes = _sent_by_device(phases[-1], message)
    at_once = phases[-1].step.settings.at_once
    codecs = [codec for each in phases for codec in each.all_reduce.codecs]
    for codec in (*codecs, at_once):
        _log_layers(getattr(codec, "layers", None), shapes)
    if at_once is not None:
        _log_share(at_once, shapes)


def _log_layers(layers: int | None, shapes: Shapes) -> None:
    if layers is not None and all(shape[:1] != (layers,) for shape in shapes):
        _log.warning(
            "`layers` of a codec is %d, but no array that a device sends has a first"
            " axis of this length: %.200s. All layers share its rank",
            layers,
            sorted({*shapes}),
        )


def _log_share(at_once: Codec, shapes: Shapes) -> None:
    count = sum(map(math.prod, shapes))
    # Matrices that a low rank does not make smaller are exchanged whole.
    sizes = cast(Linear, at_once.of(shapes)).round_sizes(count)
    share = sum(sizes) / max(1, count)
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
