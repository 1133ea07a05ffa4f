"""What a process says of itself before it joins the others, and what must agree."""

import dataclasses
import hashlib
import json
import os
import pathlib
import platform
import re
import socket
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any

import jax

from ._place import Place

_PACKAGES = ("pipejax", "jax", "jaxlib", "flax", "optax", "numpy", "orbax-checkpoint")
# Of JAX's settings those that change what is compiled.
_SETTINGS = (
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_enable_x64",
    "jax_num_cpu_devices",
    "jax_platforms",
    "jax_threefry_partitionable",
)
_NAMED = 5
"""Of many differences of a kind, so many are named one by one."""


@dataclasses.dataclass(frozen=True)
class Record:
    """A process of a job.

    Attributes:
      rank: which it says that it is.
      processes: how many it says there are.
      host: its host's name.
      same: versions and settings, which all must have alike.
      modules: digests of the sources of modules that are not installed, the main
        program among them; those that two processes have imported must be alike.
    """

    rank: int
    processes: int
    host: str
    same: dict[str, str]
    modules: dict[str, str]

    def __str__(self) -> str:
        return f"{self.rank} on {self.host}"

    def to_json(self) -> bytes:
        """One line."""
        return json.dumps(dataclasses.asdict(self)).encode() + b"\n"

    @classmethod
    def from_json(cls, line: bytes) -> "Record":
        """What `to_json` has written.

        Raises:
          ValueError: for anything else.
        """
        read = parsed(line)
        kinds = {field.name: field.type for field in dataclasses.fields(cls)}
        if read.keys() != kinds.keys():
            raise ValueError("no record of a process")
        for name, kind in kinds.items():
            value = read[name]
            texts = [*value, *value.values()] if isinstance(value, dict) else []
            if type(value) is not getattr(kind, "__origin__", kind) or not all(
                isinstance(each, str) for each in texts
            ):
                raise ValueError(f"no record of a process: {name}")
        return cls(**read)


def parsed(line: bytes) -> dict[str, Any]:
    """A JSON object; ValueError for anything else."""
    try:
        read = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError("what is said there is no JSON") from error
    if not isinstance(read, dict):
        raise ValueError("what is said there is no JSON object")
    return read


def of_this_process(place: Place, config: Mapping[str, Any]) -> Record:
    """Everything that can be told apart without a device."""
    same = {"Python": platform.python_version()}
    same |= {name: _version(name) for name in _PACKAGES}
    same |= {name: str(getattr(jax.config, name, None)) for name in _SETTINGS}
    same["XLA_FLAGS"] = _compiler_flags(os.environ.get("XLA_FLAGS", ""))
    same |= {f"config {name}": str(value) for name, value in config.items()}
    host = socket.gethostname()
    return Record(place.rank, place.processes, host, same, dict(_own_modules()))


def differences(records: Sequence[Record]) -> list[str]:
    """What processes that must be alike have not alike, a line each."""
    keys = {key: None for record in records for key in record.same}
    same = {
        key: [(record, record.same.get(key, "absent")) for record in records]
        for key in keys
    }
    names = {name: None for record in records for name in record.modules}
    modules = {
        f"module {name}": [
            (record, record.modules[name])
            for record in records
            if name in record.modules
        ]
        for name in names
    }
    return [*_unequal(same), *_unequal(modules)]


def _unequal(said: dict[str, list[tuple[Record, str]]]) -> list[str]:
    lines = []
    for what, values in said.items():
        by_value = defaultdict(list)
        for record, value in values:
            by_value[value].append(str(record))
        if len(by_value) > 1:
            each = [f"{value!r} in {_some(who)}" for value, who in by_value.items()]
            lines.append(f"{what} differs: {'; '.join(each)}")
    more = len(lines) - _NAMED
    return lines if more <= 0 else [*lines[:_NAMED], f"and {more} more like these"]


def _some(names: list[str]) -> str:
    more = len(names) - _NAMED
    shown = ", ".join(names[:_NAMED])
    return shown if more <= 0 else f"{shown} and {more} more"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"  # some are options


def _compiler_flags(text: str) -> str:
    """In one order, without where a process writes what it compiled."""
    flags = re.split(r"\s+", text.strip())
    return " ".join(sorted(flag for flag in flags if "xla_dump" not in flag))


def _own_modules() -> Iterator[tuple[str, str]]:
    """Modules imported so far whose source was not installed with Python or by pip."""
    library = sysconfig.get_path("stdlib") + os.sep
    for name, module in sorted(sys.modules.copy().items()):
        path = pathlib.Path(getattr(module, "__file__", None) or "")
        installed = {"site-packages", "dist-packages"} & set(path.parts)
        if installed or str(path).startswith(library):
            continue
        if path.suffix == ".py" and path.is_file():
            yield name, hashlib.sha256(path.read_bytes()).hexdigest()[:12]
