"""Finds compiler options under which collectives overlap with compute.

With XLA's default options, the overlap depends on the program. All but one of several
buckets wait their turn, and a small bucket on one host becomes one more kernel of the
compute stream. The right options differ by backend and generation of devices, and their
names change between versions of XLA. Each option is therefore tried on the installed
compiler, and left out if the compiler refuses it.
"""

import functools
import logging
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

_log = logging.getLogger(__name__)

GPU = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    # By default, one collective runs at a time: a second bucket waits for the first.
    "xla_gpu_experimental_parallel_collective_overlap_limit": 32,
    "xla_gpu_experimental_collective_start_as_early_as_possible": True,
    # By default, a small all-reduce on one host becomes a kernel of the compute stream.
    "xla_gpu_experimental_use_collective_kernels": "",
    # XLA would merge all-reduces up to 30 MB, by copies of what it merges and of the
    # sums. A small array would then keep the copy of a large one in memory. At width 1,
    # the first all-reduce would also start late.
    "xla_gpu_all_reduce_combine_threshold_bytes": 8 << 20,
}
# By default, all collectives count as equally long. The second collective of a codec
# may then start after those that the devices of a group need for the backward pass.
GPU_MIXED = {**GPU, "xla_gpu_enable_analytical_latency_estimator": True}
TPU_V5E = {
    "xla_enable_async_all_reduce": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": True,
}
TPU_SPARSE_CORE = {
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce": True,
    # Without this option, a long all-reduce is offloaded only after the backward pass.
    "xla_tpu_enable_all_experimental_scheduler_features": True,
}
# By the device kind that JAX reports. TPU7x overlaps without any options.
TPU = {
    "TPU v5 lite": TPU_V5E,
    "TPU v5": TPU_SPARSE_CORE,
    "TPU v5p": TPU_SPARSE_CORE,
    "TPU v6 lite": TPU_SPARSE_CORE,
}


class Options(NamedTuple):
    """Compiler options, after each was tried on the compiler.

    Attributes:
      kept: The options that the compiler accepts, to compile with.
      dropped: The options that it refuses, each with the first line of its error.
    """

    kept: dict[str, Any]
    dropped: dict[str, str]


@functools.cache
def options_for(mesh: Mesh, *, mixed: bool = False) -> Options:
    """Returns the options for a step's devices, tried on the compiler.

    If `mixed`, what is known when the step begins travels beside collectives that the
    step itself needs, such as those inside of groups.
    """
    device = mesh.devices.flat[0]
    wanted: dict[str, Any] = {}
    if device.platform in ("gpu", "cuda"):
        wanted = GPU_MIXED if mixed else GPU
    elif device.platform == "tpu":
        wanted = TPU.get(device.device_kind, {})
    return probe(mesh, wanted)


def compiler_options(mesh: Mesh) -> dict[str, Any]:
    """Returns options under which collectives overlap with compute, for a `jax.jit`.

    Use them for a program of your own. With XLA's default options, it depends on the
    program and the devices whether a delayed all-reduce overlaps with anything. The
    fused executor of a `pj.TrainStep` uses these options already, except in a step that
    is called inside another `jax.jit`.

    Args:
      mesh: The devices to compile for.

    Returns:
      A dict to pass as `jax.jit(..., compiler_options=...)`, with the options that the
      installed compiler accepts. It is empty on CPUs, where a program waits for its
      collectives.

    Examples:
      >>> from pipejax import data_mesh
      >>> compiler_options(data_mesh(1))
      {}
    """
    return dict(options_for(mesh).kept)


def probe(mesh: Mesh, wanted: dict[str, Any]) -> Options:
    """Tries options on a program of one addition, and logs those that are refused.

    If the compiler refuses all of them together, each is tried beside those that were
    accepted before it.
    """
    kept: dict[str, Any] = {}
    dropped: dict[str, str] = {}
    if wanted and _refusal(mesh, wanted) is None:
        return Options(dict(wanted), {})
    for name, value in wanted.items():
        refusal = _refusal(mesh, {**kept, name: value})
        if refusal is None:
            kept[name] = value
        else:
            dropped[name] = refusal
            _log.warning("compiler option %s left out: %s", name, refusal)
    return Options(kept, dropped)


def _refusal(mesh: Mesh, options: dict[str, Any]) -> str | None:
    """Returns the first line of the compiler's error, or `None` if there is none."""
    shape = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(mesh, P()))
    try:
        jax.jit(lambda x: x + 1).lower(shape).compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        return str(error).splitlines()[0]
    return None
