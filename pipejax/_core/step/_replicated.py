"""Makes a step in which every device has all parameters and the whole optimizer."""

import functools

import optax
from jax.sharding import Mesh

from pipejax._core.message import Exchange, Message, Valid, averaging
from pipejax._internal.shards import Shards
from pipejax.collectives import AllReduce

from ._compute import compute
from ._counters import delayed_counters
from ._gradient import local_message
from ._prediction import empty_mean, kinds, point
from ._state import Trainable
from ._step import Settings, Step
from ._update import apply


def replicated_step(settings: Settings) -> Step:
    """Returns the step in which every device applies the whole update.

    $$w_t = w_{t-1} - u(g_{t-K})$$

    The exchange is an all-reduce.
    """
    kind_of = kinds(settings)
    begin = functools.partial(empty_mean, settings, kind_of)
    at = functools.partial(point, settings, kind_of)

    def init(whole: Trainable, length: int) -> Trainable:
        counters = delayed_counters(settings, whole)
        return whole._replace(mean=begin(whole, length), delayed_counters=counters)

    def exchange(
        trainable: Trainable | None,
        message: Message,
        valid: Valid,
        all_reduce: AllReduce,
    ) -> Exchange:
        del trainable
        return averaging(message, valid.message, all_reduce, settings.axis_name)

    return Step(
        settings=settings,
        layout=_layout,
        init=init,
        message=functools.partial(local_message, settings),
        compute=functools.partial(compute, settings, at, begin),
        exchange=exchange,
        gather=None,
        apply=functools.partial(apply, settings),
    )


def _layout(
    params: optax.Params, shards: Shards, message: Message, mesh: Mesh
) -> Shards:
    del params, message, mesh
    return shards
