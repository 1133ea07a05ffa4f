"""Accelerators that are not there, to compile for.

- `h100:1x8x8`: slices x hosts x GPUs of a host; also a100, h200, b200
- `tpu:v5e:2x4`: chips along each axis of the torus; also v5p, v6e, tpu7x
- `tpu:v5e:4x4:2`: two slices of them, joined by the data-center network

Programs compiled for them cannot run, but their schedule can be read.
"""

import contextlib
import importlib
import importlib.util
import os
import re
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental import topologies

from pipejax.gpus import GPUS, target_config

TPUS = ("v5e", "v5p", "v6e", "tpu7x")
INSTALL = "pip install 'pipejax[aot]'"


def topology(target: str) -> list[Any]:
    """Devices of `target`, which need not be there, to make a mesh of.

    Args:
      target: kind and shape: `"h100:1x8x8"` is one slice of 8 hosts with 8 GPUs each,
        `"tpu:v5e:2x4"` 8 chips.

    Returns:
      The devices, for `pj.data_mesh(devices=...)`. A function jitted over such a mesh
      can be lowered and compiled; its arguments are `jax.ShapeDtypeStruct`s.

    Raises:
      ValueError: for a target that does not exist.
      ImportError: if the compiler for it is not installed.
    """
    match = re.fullmatch(r"(tpu:)?(\w+):(\d+(?:x\d+)*)(?::([1-9]\d*))?", target)
    tpu, kind, shape, slices = match.groups() if match else ("", "", "", None)
    if kind in GPUS and not tpu and not slices:
        if shape.count("x") != 2 or "0" in shape.split("x"):
            raise _no_such(target, "a GPU's shape is slices x hosts x GPUs of a host")
        return _gpus(kind, shape)
    if kind in TPUS:
        return _tpus(target, f"{kind}:{shape}", int(slices or 1))
    raise _no_such(target, "there is no such kind")


def _no_such(target: str, why: str) -> ValueError:
    return ValueError(
        f"`target` must be a kind and a shape: {', '.join(GPUS)} with one such as"
        f" 'h100:1x8x8' (slices x hosts x GPUs of a host), or {', '.join(TPUS)} with"
        " one such as 'tpu:v5e:2x4' (chips along each axis) or 'tpu:v5e:2x4:2' (of 2"
        f" slices); got {target!r}: {why}."
    )


def _gpus(kind: str, shape: str) -> list[Any]:
    _check_installed(kind, "jax_plugins.xla_cuda12", "nvidia.cuda_nvcc")

    def describe() -> Any:
        return topologies.get_topology_desc(
            platform="cuda",
            topology_name=kind,
            topology=shape,
            target_config=target_config(GPUS[kind]),
        )

    # The plugin refuses to start where there are no CUDA libraries, unless told not to
    # look. It was already refused if JAX looked for GPUs before this call.
    with _environment(JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1", TF_CPP_MIN_LOG_LEVEL="2"):
        try:
            devices = describe().devices
        except NotImplementedError:
            importlib.import_module("jax_plugins.xla_cuda12").initialize()
            devices = describe().devices
    return list(devices)


def _tpus(target: str, name: str, slices: int) -> list[Any]:
    _check_installed(target, "libtpu")
    # Without these libtpu asks the cloud's metadata server which TPU this is, and
    # wants to be the only process that has it.
    with _environment(
        TPU_SKIP_MDS_QUERY="1",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
        TPU_WORKER_HOSTNAMES="localhost",
        TPU_ACCELERATOR_TYPE="",
    ):
        try:
            several = {"num_slices": slices} if slices > 1 else {}
            described = topologies.get_topology_desc(
                platform="tpu", topology_name=name, **several
            )
            return list(described.devices)
        except jax.errors.JaxRuntimeError as error:
            raise _no_such(target, str(error).splitlines()[0]) from error


def _check_installed(target: str, *modules: str) -> None:
    missing = [name for name in modules if not _exists(name)]
    if missing:
        raise ImportError(
            f"{' and '.join(missing)} must be installed to compile for {target!r}:"
            f" {INSTALL}"
        )


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Sets those that are not set, for the time of a `with`."""
    new = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            del os.environ[name]
