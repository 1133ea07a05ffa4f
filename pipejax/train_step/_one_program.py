"""Has processes compare what must be the same for them to run one program.

With different settings, some would wait for others forever, or add up gradients that do
not belong together.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax

from pipejax._core.executors import StepConfig
from pipejax._internal.structures import containers
from pipejax._internal.types import Tree

from ._replicate import first_differing

_COMPARED = (
    "weight_prediction",
    "microbatches",
    "skip_nonfinite",
    "at_once",
    "gather_codec",
)
_PLAIN = bool | int | float | str | None | np.dtype | type


def check_same_settings(settings: dict[str, str]) -> None:
    """Raises a `ValueError` if a setting differs, and names the first. A collective."""
    if found := first_differing([(text,) for text in settings.values()]):
        place, processes = found
        name, text = [*settings.items()][place]
        raise ValueError(
            f"`{name}` must be the same on every process, because all run one program;"
            f" got another value on processes {processes} than on process 0. Here it is"
            f" {text}."
        )


def check_same_batch(batch: Tree) -> None:
    """Raises a `ValueError` if the form of a global batch differs. A collective."""
    text = _form(batch)
    if found := first_differing([(containers(batch), text)]):
        raise ValueError(
            "`batch` must have the same arrays with the same shapes on every process;"
            f" got others on processes {found[1]} than on process 0. Here they are"
            f" {text}. Give `train.batch` as many examples on every process."
        )


def settings_of(
    phases: Sequence[StepConfig], opt_state: optax.OptState
) -> dict[str, str]:
    """Returns the settings of a train step as text, by the names of its arguments.

    `opt_state` has the shapes of a state of its optimizer. Functions are left out: they
    have no text that other processes could compare.
    """
    last, settings = phases[-1], phases[-1].step.settings
    values = {
        "width": last.width,
        "all_reduce": [phase.all_reduce for phase in phases],
        "shard_optimizer": last.step.shards_optimizer,
    }
    for name in _COMPARED:
        values[name] = getattr(settings, name)
    for name in ("compute_dtype", "reduce_dtype"):
        dtype = getattr(settings, name)
        values[name] = None if dtype is None else np.dtype(dtype).name
    texts = {name: described(value) for name, value in values.items()}
    return {**texts, "tx": _form(opt_state)}


def described(value: Any) -> str:
    """Returns the types, numbers and names that an algorithm or a codec is made of.

    Examples:
      >>> import pipejax as pj
      >>> described(pj.codecs.error_feedback(pj.codecs.int8(64)))
      "ErrorFeedback(Integers(8, 64), 1.0, 'float32')"
    """
    if isinstance(value, _PLAIN):
        return repr(value)
    name = type(value).__qualname__
    if dataclasses.is_dataclass(value):
        parts = [getattr(value, field.name) for field in dataclasses.fields(value)]
    elif isinstance(value, list | tuple):
        parts = [*value]
    else:
        return name
    return f"{name}({', '.join(map(described, parts))})"


def _form(tree: Tree) -> str:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    keystr = jax.tree_util.keystr
    return ", ".join(f"{keystr(path)} {x.dtype}{list(x.shape)}" for path, x in leaves)
