"""A cluster as JSON, and back; what is wrong with a record is said by its path."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ._cluster import Cluster, CodecSpeed, Link, Shares

T = TypeVar("T")
Read = Callable[[Any, str], Any]

# Fields that may be infinite, of what takes no time. JSON has no infinity.
_SPEEDS = ("bandwidth", "reduction", "encode", "decode")


def as_json(cluster: Cluster) -> dict[str, Any]:
    """Makes of a cluster what `from_json` takes, an infinite speed `None`."""
    return _finite(dataclasses.asdict(cluster))


def from_json(record: Mapping[str, Any]) -> Cluster:
    """Makes a cluster of what `as_json` made.

    Args:
      record: `hosts` and `link`, and what else a `Cluster` has; `None` for a speed that
        takes no time.

    Raises:
      ValueError: for a record that is no cluster; it names the field.
    """
    return _made(
        Cluster,
        record,
        "cluster",
        link=lambda value, where: _made(Link, value, where),
        inner=lambda value, where: None if value is None else _made(Link, value, where),
        shares=lambda value, where: _made(Shares, value, where),
        codecs=_speeds,
    )


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    return None if value == math.inf else value


def _speeds(record: Any, where: str) -> dict[str, CodecSpeed]:
    _check_object(record, where, "of codecs by their names")
    return {name: _made(CodecSpeed, x, f"{where}.{name}") for name, x in record.items()}


def _made(kind: type[T], record: Any, where: str, **parts: Read) -> T:
    """A dataclass of a record's fields, of which some are read by `parts`."""
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    names = [field.name for field in fields]
    _check_object(record, where, f"with the fields {', '.join(names)}")
    unknown = [name for name in record if name not in names]
    if unknown:
        raise ValueError(
            f"`{where}` must have no fields but {', '.join(names)}; got {unknown}."
        )
    missing = [
        field.name
        for field in fields
        if field.default is field.default_factory is dataclasses.MISSING
        and field.name not in record
    ]
    if missing:
        raise ValueError(
            f"`{where}` must have {' and '.join(missing)}, got {sorted(record)}."
        )
    values = {}
    for name, value in record.items():
        if name in parts:
            value = parts[name](value, f"{where}.{name}")
        elif value is None and name in _SPEEDS:
            value = math.inf
        values[name] = value
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"In `{where}`: {error}") from error


def _check_object(record: Any, where: str, what: str) -> None:
    if not isinstance(record, Mapping):
        raise ValueError(f"`{where}` must be an object {what}, got {record!r}.")
