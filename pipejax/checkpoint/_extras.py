"""Turns the extras of a checkpoint into what JSON returns unchanged, and back.

Bytes become text. A `PerProcess` becomes the list of the values of all processes, so
that the extras are the same everywhere and process 0 can write them.
"""

import base64
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ._gather import gathered
from ._json_values import json_copy

# The only keys of the dicts that stand for such values.
_BYTES, _EACH = "pipejax bytes", "pipejax per process"


class PerProcess:
    """Marks a value in `extras` of which every process has its own.

    An example is the state of a data iterator that reads one shard of the data. `save`
    writes the values of all processes. After `restore`, `value` is the one that the
    process of the same rank has saved.

    Args:
      value: What `extras` may hold, without another `PerProcess`.

    Attributes:
      saved: After `restore`, the values of all processes that have saved, by rank.

    Examples:
      >>> from pipejax import checkpoint
      >>> extras = {"calls": 7, "data": checkpoint.PerProcess(b"shard 0, example 448")}
      >>> extras["data"].value
      b'shard 0, example 448'
    """

    def __init__(self, value: Any, *, _saved: Sequence[Any] = ()) -> None:
        self._value = value
        self.saved = tuple(_saved)

    @property
    def value(self) -> Any:
        """Returns the value of this process.

        Raises:
          ValueError: After `restore` on another number of processes.
        """
        if not self.saved:
            return self._value
        count = jax.process_count()
        if len(self.saved) != count:
            raise ValueError(
                "`value` must be read on as many processes as have saved it, got a"
                f" checkpoint of {len(self.saved)} on {count}. Begin with new data"
                " iterators, best at the start of an epoch, or divide `saved`, the"
                f" values of all {len(self.saved)}, among the processes."
            )
        return self.saved[jax.process_index()]

    def __repr__(self) -> str:
        held = f"saved={self.saved!r}" if self.saved else repr(self._value)
        return f"PerProcess({held})"


def packed(extras: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """Returns extras as JSON keeps them, and the values of this process alone.

    In the extras, the index of its value stands in the place of each `PerProcess`.
    """
    own: list[Any] = []
    try:
        found, values = _packed("extras", extras, own), [*own]
    except RecursionError:  # the extras contain themselves, which `json_copy` says
        found, values = extras, []
    return json_copy("extras", found), json_copy("extras", {"own": values})["own"]


def filled(extras: dict[str, Any], own: list[Any]) -> dict[str, Any]:
    """Fills in the values of all processes. All must have the same packed extras."""
    if not own:
        return extras
    by_rank = gathered(own)
    return _replaced(extras, _EACH, lambda n: {_EACH: [each[n] for each in by_rank]})


def unpacked(extras: dict[str, Any]) -> dict[str, Any]:
    """Returns the extras that `save` was given from what it has written."""
    decoded = _replaced(extras, _BYTES, base64.b64decode)
    return _replaced(decoded, _EACH, lambda saved: PerProcess(None, _saved=saved))


def _packed(where: str, value: Any, own: list[Any] | None) -> Any:
    """Replaces bytes and `PerProcess`. Without `own`, the latter is refused."""
    if type(value) is bytes:
        return {_BYTES: base64.b64encode(value).decode()}
    if isinstance(value, PerProcess):
        if own is None:
            raise ValueError(
                f"`{where}` must not be a PerProcess inside another, got {value!r:.80}."
                " Pass its value."
            )
        own.append(_packed(where, value.value, None))
        return {_EACH: len(own) - 1}
    if type(value) is dict:
        if taken := value.keys() & {_BYTES, _EACH}:
            raise ValueError(
                f"`{where}` must not have the key {min(taken)!r}, with which pipejax"
                " marks values. Choose another name."
            )
        return {k: _packed(f"{where}[{k!r}]", x, own) for k, x in value.items()}
    if type(value) is list:
        return [_packed(f"{where}[{n}]", x, own) for n, x in enumerate(value)]
    return value  # `json_copy` refuses all that JSON would change


def _replaced(value: Any, key: str, made: Callable[[Any], Any]) -> Any:
    """Replaces each dict whose only key is `key`."""
    if type(value) is dict:
        if value.keys() == {key}:
            return made(value[key])
        return {name: _replaced(entry, key, made) for name, entry in value.items()}
    if type(value) is list:
        return [_replaced(entry, key, made) for entry in value]
    return value
