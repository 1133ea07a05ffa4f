"""All ways to train, by the names that they have in tables."""

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import jax

from pipejax import codecs, collectives
from pipejax.overlap import NoCommunication

from ._local import Local
from ._method import Method
from ._parameter_server import AsynchronousServer
from ._pipejax import Pipejax
from ._problem import Problem
from ._text_problem import TextProblem


class NotInstalledError(Exception):
    """Raised if the library of a way to train is not installed."""


AnyProblem = Problem | TextProblem
Make = Callable[[AnyProblem], Method]
RANK = 1  # of PowerSGD in pipejax and in PyTorch; the fastest rank


def _ours(
    width: int, all_reduce: Callable[[], collectives.AllReduce], **settings: Any
) -> Make:
    return lambda problem: Pipejax(problem, width, all_reduce(), **settings)


def _ring(codec: str) -> Callable[[], collectives.AllReduce]:
    """Returns a function that makes the paper's ring, which compresses at every hop."""
    return lambda: collectives.ring(codecs.named(codec))


def fed_back(codec: codecs.Codec) -> collectives.AllReduce:
    """Returns the algorithm with a codec that sends later what it loses."""
    return collectives.two_shot(codecs.error_feedback(codec))


def _power_sgd() -> Callable[[], collectives.AllReduce]:
    def make() -> collectives.AllReduce:
        codec = codecs.power_sgd(RANK, jax.random.key(0))
        return collectives.psum(codecs.error_feedback(codec))

    return make


def _at_once(rank: int) -> Make:
    """Returns what makes a pipeline that exchanges a part of low rank at once."""

    def make(problem: AnyProblem) -> Method:
        codec = codecs.power_sgd(rank, jax.random.key(0))
        return Pipejax(problem, 2, collectives.psum(), at_once=codec)

    return make


def _local(codec: codecs.Codec) -> Make:
    """Returns what makes local steps whose length hides the exchange."""
    return lambda problem: Local(problem, "auto", all_reduce=fed_back(codec))


def _asynchronous(problem: AnyProblem) -> Method:
    return AsynchronousServer(problem, _port(1))


def _ddp(hook: Any = "none", rank: int = RANK) -> Make:
    def make(problem: AnyProblem) -> Method:
        if importlib.util.find_spec("torch") is None:
            raise NotInstalledError(
                "PyTorch is not installed: pip install 'pipejax[peers]'"
            )
        from ._ddp import DDP
        from ._torch_images import ImageTwin
        from ._torch_text import TextTwin

        if isinstance(problem, TextProblem):
            return DDP(TextTwin(problem), _port(2), hook, rank)
        return DDP(ImageTwin(problem), _port(2), hook, rank)

    return make


def _port(offset: int) -> int:
    return int(os.environ["MASTER_PORT"]) + offset


NAMES: dict[str, Make] = {
    "compute": _ours(1, NoCommunication),
    "PS-Sync": _ours(1, collectives.parameter_server),
    "PS-Async": _asynchronous,
    "D-Sync": _ours(1, collectives.psum),
    "D-Sync, truncate": _ours(1, _ring("truncate")),
    "D-Sync, int8": _ours(1, _ring("int8")),
    "D-Sync, int4 fed back": _ours(1, lambda: fed_back(codecs.int4())),
    "Pipe-SGD": _ours(2, collectives.psum),
    "Pipe-SGD, plain": _ours(2, collectives.psum, weight_prediction=False),
    "Pipe-SGD, truncate": _ours(2, _ring("truncate")),
    "Pipe-SGD, int8": _ours(2, _ring("int8")),
    "Pipe-SGD, int4": _ours(2, _ring("int4")),
    "Pipe-SGD, int8 fed back": _ours(2, lambda: fed_back(codecs.int8())),
    "Pipe-SGD, int4 fed back": _ours(2, lambda: fed_back(codecs.int4())),
    "Pipe-SGD, PowerSGD": _ours(2, _power_sgd()),
    "Pipe-SGD, rank 4 at once": _at_once(4),
    "Pipe-SGD, rank 16 at once": _at_once(16),
    "ZeRO-1": _ours(1, collectives.psum, shard_optimizer=True),
    "Pipe-SGD, ZeRO-1": _ours(2, collectives.psum, shard_optimizer=True),
    "local steps, int4": _local(codecs.int4()),
    "DDP compute": _ddp("silent"),
    "DDP": _ddp(),
    "DDP, fp16": _ddp("fp16"),
    "DDP, PowerSGD": _ddp("power_sgd"),
    "DDP, PowerSGD, rank 4": _ddp("power_sgd", 4),
    "DDP, ZeRO-1": _ddp("zero"),
}


def make(name: str, problem: AnyProblem) -> Method:
    """Makes the part of one host in a way to train; all hosts must call this.

    Args:
      name: A name of `NAMES`.
      problem: The problem to train.

    Raises:
      ValueError: If no way to train has this name.
      NotInstalledError: If the library that this way needs is not installed.
    """
    if name not in NAMES:
        raise ValueError(f"`name` must be one of {', '.join(NAMES)}; got {name!r}.")
    return NAMES[name](problem)
