"""Which executor runs a step, and why."""

import logging

import jax

from ._fused import Fused
from ._setting import Executor, Setting

_log = logging.getLogger(__name__)

EXECUTORS: dict[str, type] = {"fused": Fused}


def choose(name: str, setting: Setting) -> Executor:
    """The executor of that name; of `"auto"` the one that hides communication here."""
    return Fused(setting)
