"""Devices of absent accelerators, to compile programs for."""

import contextlib
import importlib
import importlib.util
import math
import os
import re
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental import topologies

from pipejax._internal.gpus import GPUS, target_config

TPUS = ("v5e", "v5p", "v6e", "tpu7x")
INSTALL = "pip install 'pipejax[aot]'"
MOST = 100_000
"""The largest number of chips of a target. More take minutes to describe."""


def topology(target: str) -> list[Any]:
    """Returns the devices of an accelerator that need not be present.

    Use it to find out how XLA schedules a program for many accelerators: make a mesh of
    the devices, and pass a program over this mesh to `inspect`. The program can be
    lowered and compiled, with `jax.ShapeDtypeStruct`s as its arguments, but it cannot
    run.

    Args:
      target: Kind and shape of the accelerator. For GPUs (`a100`, `h100`, `h200`,
        `b200`) the shape is slices x hosts x GPUs per host: `"h100:1x8x8"` is one slice
        of 8 hosts with 8 GPUs each. For TPUs (`v5e`, `v5p`, `v6e`, `tpu7x`) it is the
        number of chips along each axis: `"tpu:v5e:2x4"` is 8 chips, and
        `"tpu:2xv5e:2x4"` is two slices of them, joined by the data-center network. The
        prefix `tpu:` may be left out.

    Returns:
      A list of the devices, for `pj.data_mesh(devices=...)`. A `tpu7x` chip has two
      devices, any other chip one.

    Raises:
      ValueError: If the target does not exist.
      ImportError: If the compiler for the target is not installed. The extra
        `pipejax[aot]` has the compilers for GPU and TPU.
    """
    form = r"(tpu:)?(?:([1-9]\d{0,9})x)?([a-z]\w*):(\d{1,10}(?:x\d{1,10})*)"
    match = re.fullmatch(form, target)
    tpu, slices, kind, shape = match.groups() if match else ("", None, "", "")
    numbers = [int(n) for n in shape.split("x") if shape] + [int(slices or 1)]
    if math.prod(n or 1 for n in numbers) > MOST:
        raise _no_such(target, f"there may be at most {MOST:,} devices")
    if kind in GPUS and not tpu:
        if slices:
            raise _no_such(target, "the first number of a GPU's shape is the slices")
        if shape.count("x") != 2 or "0" in shape.split("x"):
            raise _no_such(target, "a GPU's shape is slices x hosts x GPUs per host")
        return _gpus(target, kind, shape)
    if kind in TPUS:
        return _tpus(target, f"{kind}:{shape}", int(slices or 1))
    raise _no_such(target, "there is no such kind")


def _no_such(target: str, why: str) -> ValueError:
    return ValueError(
        f"`target` must be a kind and a shape: {', '.join(GPUS)} with a shape such as"
        f" 'h100:1x8x8' (slices x hosts x GPUs per host), or {', '.join(TPUS)} with a"
        " shape such as 'tpu:v5e:2x4' (chips along each axis) or 'tpu:2xv5e:2x4' (two"
        f" slices); got {target!r:.60}: {why}."
    )


def _gpus(target: str, kind: str, shape: str) -> list[Any]:
    _check_installed(target, "jax_plugins.xla_cuda12", "nvidia.cuda_nvcc")

    def describe() -> Any:
        return topologies.get_topology_desc(
            platform="cuda",
            topology_name=kind,
            topology=shape,
            target_config=target_config(GPUS[kind]),
        )

    # The CUDA plugin does not start on a machine without CUDA libraries unless it is
    # told to skip the check. If JAX has looked for GPUs before this call, the plugin
    # has already failed to start, and is initialized here.
    with _environment(JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1", TF_CPP_MIN_LOG_LEVEL="2"):
        try:
            devices = describe().devices
        except NotImplementedError:
            importlib.import_module("jax_plugins.xla_cuda12").initialize()
            devices = describe().devices
    return list(devices)


def _tpus(target: str, name: str, slices: int) -> list[Any]:
    _check_installed(target, "libtpu")
    # Without these variables, libtpu asks the metadata server of the cloud which TPU
    # it runs on, and allows only one process to load it.
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
    new = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            del os.environ[name]
