"""Converts clusters to JSON records and back. Errors name the path of the bad field."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, TypeVar

from ._cluster import Cluster, CodecSpeed, Link, Shares

T = TypeVar("T")

# Fields that are infinite for work that takes no time. JSON has no infinity, so that a
# record has `None` in its place.
_SPEEDS = ("bandwidth", "reduction", "encode", "decode")
_PARTS = {"link": Link, "inner": Link, "shares": Shares}  # records of their own


def as_json(cluster: Cluster) -> dict[str, Any]:
    """Converts a cluster to a record of types that JSON has; see `from_json`.

    Args:
      cluster: The cluster.

    Returns:
      A dictionary with the fields of the cluster. An infinite speed becomes `None`,
      because JSON has no infinity.
    """
    return _finite(dataclasses.asdict(cluster))


def from_json(record: Mapping[str, Any]) -> Cluster:
    """Converts a record that `as_json` made, or that was written by hand, to a cluster.

    Args:
      record: The fields of a `pj.timing.Cluster`. `hosts` and `link` are required. A
        speed of `None` takes no time.

    Returns:
      The cluster.

    Raises:
      ValueError: If a field is missing, unknown or not valid. The message names the
        field.

    Examples:
      >>> import pipejax as pj
      >>> record = {"hosts": 4, "link": {"latency": 50e-6, "bandwidth": 125e6}}
      >>> pj.timing.from_json(record).link
      Link(latency=5e-05, bandwidth=125000000.0)
    """
    return _made(Cluster, record, "cluster")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    return None if value == math.inf else value


def _made(kind: type[T], record: Any, where: str) -> T:
    """Makes a dataclass from the fields of a record; errors name the path `where`."""
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    names = [field.name for field in fields]
    _check_object(record, where, f"with the fields {', '.join(names)}")
    unknown = [name for name in record if name not in names]
    if unknown:
        raise ValueError(
            f"`{where}` must have no fields but {', '.join(names)}; got"
            f" {unknown!r:.80}."
        )
    missing = [
        field.name
        for field in fields
        if field.default is field.default_factory is dataclasses.MISSING
        and field.name not in record
    ]
    if missing:
        raise ValueError(
            f"`{where}` must have {' and '.join(missing)}, got {sorted(record)!r:.200}."
        )
    values = {name: _read(name, x, f"{where}.{name}") for name, x in record.items()}
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"In `{where}`: {error}") from error


def _read(name: str, value: Any, where: str) -> Any:
    """Returns the value of a field, which may be a record of its own."""
    if name == "codecs":
        _check_object(value, where, "that maps codec names to speeds")
        return {x: _made(CodecSpeed, value[x], f"{where}.{x}") for x in value}
    if value is None and name in _SPEEDS:
        return math.inf
    if name in _PARTS and not (name == "inner" and value is None):
        return _made(_PARTS[name], value, where)
    return value


def _check_object(record: Any, where: str, what: str) -> None:
    if not isinstance(record, Mapping):
        raise ValueError(f"`{where}` must be an object {what}, got {record!r:.80}.")
