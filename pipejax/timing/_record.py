"""A cluster as JSON, and back."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ._cluster import Cluster, CodecSpeed, Link, Shares


def as_json(cluster: Cluster) -> dict[str, Any]:
    """What `from_json` takes."""
    return dataclasses.asdict(cluster)


def from_json(record: Mapping[str, Any]) -> Cluster:
    """A cluster from what `as_json` made.

    Raises:
      ValueError: for a record that is no cluster.
    """
    try:
        fields = dict(record)
        inner = fields.pop("inner", None)
        speeds = fields.pop("codecs", {})
        return Cluster(
            link=Link(**fields.pop("link")),
            inner=None if inner is None else Link(**inner),
            shares=Shares(**fields.pop("shares", {})),
            codecs={name: CodecSpeed(**speed) for name, speed in speeds.items()},
            **fields,
        )
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            "`record` must be a cluster as `pipejax calibrate` writes it, with hosts"
            f" and link; got {record!r}: {error}."
        ) from error
