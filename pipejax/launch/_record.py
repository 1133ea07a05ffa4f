"""The record of a process: everything that all processes of a job must agree on."""

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
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any, ClassVar

import jax

from ._place import Place

_PACKAGES = ("pipejax", "jax", "jaxlib", "flax", "optax", "numpy", "orbax-checkpoint")
# The settings of JAX that change what is compiled.
_SETTINGS = (
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_enable_x64",
    "jax_num_cpu_devices",
    "jax_platforms",
    "jax_threefry_partitionable",
)
_NAMED = 5  # the number of differences, or of processes, that are named one by one


class JsonLine:
    """Base of the dataclasses that processes send each other, as a line of JSON."""

    noun: ClassVar[str]  # in errors: the line is not `noun`

    def to_json(self: Any) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode() + b"\n"

    @classmethod
    def from_json(cls: Any, line: bytes) -> Any:
        try:
            read = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError("the line is not JSON") from error
        kinds = {field.name: field.type for field in dataclasses.fields(cls)}
        if not isinstance(read, dict) or read.keys() != kinds.keys():
            raise ValueError(f"the line is not {cls.noun}")
        for name, kind in kinds.items():
            value = read[name]
            texts = [*value] if isinstance(value, dict | list) else []
            texts += value.values() if isinstance(value, dict) else []
            if type(value) is not getattr(kind, "__origin__", kind) or not all(
                isinstance(each, str) for each in texts
            ):
                raise ValueError(f"the line is not {cls.noun}: {name}")
        return cls(**read)


@dataclasses.dataclass(frozen=True)
class Record(JsonLine):
    """A process of a job, as it describes itself before it joins the others."""

    noun = "the record of a process"
    rank: int
    processes: int
    host: str
    same: dict[str, str]  # values by name that must be the same in all processes
    modules: dict[str, str]  # digests of imported modules that are not installed ones

    def __str__(self) -> str:
        return f"{self.rank} on {self.host}"


def of_this_process(
    place: Place, config: Mapping[str, Any], modules: dict[str, str]
) -> Record:
    """Collects what can be compared before JAX has asked for devices."""
    same = {"Python": platform.python_version()}
    same |= {name: _version(name) for name in _PACKAGES}
    same |= {name: str(getattr(jax.config, name, None)) for name in _SETTINGS}
    same["XLA_FLAGS"] = _compiler_flags(os.environ.get("XLA_FLAGS", ""))
    same |= {f"config {name}": str(value) for name, value in config.items()}
    host = socket.gethostname()
    return Record(place.rank, place.processes, host, same, modules)


def differences(records: Sequence[Record]) -> list[str]:
    keys = {key: None for record in records for key in record.same}
    same = {
        key: [(record, record.same.get(key, "absent")) for record in records]
        for key in keys
    }
    names = {name: None for record in records for name in record.modules}
    modules = {
        f"the source digest of module {name}": [
            (record, record.modules[name])
            for record in records
            if name in record.modules
        ]
        for name in names
    }
    return [*_unequal(same), *_unequal(modules)]


def _unequal(said: dict[str, list[tuple[Record, str]]]) -> list[str]:
    """Returns a line for each name that has several values, at most `_NAMED`."""
    lines = []
    for what, values in said.items():
        by_value = defaultdict(list)
        for record, value in values:
            by_value[value].append(f"process {record}")
        if len(by_value) > 1:
            each = [f"{value!r} in {_some(who)}" for value, who in by_value.items()]
            lines.append(
                f"{what} must be the same in all processes; got {'; '.join(each)}"
            )
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
        return "absent"  # some packages are optional


def _compiler_flags(text: str) -> str:
    flags = re.split(r"\s+", text.strip())
    # Each process may dump its programs to a folder of its own.
    return " ".join(sorted(flag for flag in flags if "xla_dump" not in flag))


def own_modules() -> dict[str, str]:
    """Returns the digest of each imported module that is not an installed one."""
    library, found = sysconfig.get_path("stdlib") + os.sep, {}
    for name, module in sorted(sys.modules.copy().items()):
        path = pathlib.Path(getattr(module, "__file__", None) or "")
        installed = {"site-packages", "dist-packages"} & set(path.parts)
        if installed or str(path).startswith(library):
            continue
        if path.suffix == ".py" and path.is_file():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    return found
