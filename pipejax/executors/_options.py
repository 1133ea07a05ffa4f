"""Compiler options under which a collective runs beside compute.

With XLA's defaults that depends on the program: of several buckets all but one wait
their turn, and a small one on one host becomes a kernel among the others. Options
differ by backend and generation, and their names come and go: each is tried on the
compiler that is there, and left out where it is refused.
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
    # One collective at a time by default: a second bucket would wait for the first.
    "xla_gpu_experimental_parallel_collective_overlap_limit": 32,
    "xla_gpu_experimental_collective_start_as_early_as_possible": True,
    # On one host a small all-reduce becomes a kernel of the compute stream.
    "xla_gpu_experimental_use_collective_kernels": "",
}
TPU_V5E = {
    "xla_enable_async_all_reduce": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": True,
}
TPU_SPARSE_CORE = {
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce": True,
    # Without it a long all-reduce is handed over only after the backward pass.
    "xla_tpu_enable_all_experimental_scheduler_features": True,
}
# By the device kind that JAX reports. TPU7x overlaps as it is.
TPU = {
    "TPU v5 lite": TPU_V5E,
    "TPU v5": TPU_SPARSE_CORE,
    "TPU v5p": TPU_SPARSE_CORE,
    "TPU v6 lite": TPU_SPARSE_CORE,
}


class Options(NamedTuple):
    """What a compiler takes of what it was offered.

    Attributes:
      kept: options to compile with.
      dropped: what was refused, and the compiler's word for it.
    """

    kept: dict[str, Any]
    dropped: dict[str, str]


@functools.cache
def options_for(mesh: Mesh) -> Options:
    """The options for the mesh's devices, tried on their compiler, once."""
    device = mesh.devices.flat[0]
    wanted: dict[str, Any] = {}
    if device.platform in ("gpu", "cuda"):
        wanted = GPU
    elif device.platform == "tpu":
        wanted = TPU.get(device.device_kind, {})
    return probe(mesh, wanted)


def compiler_options(mesh: Mesh) -> dict[str, Any]:
    """Options under which collectives run beside compute, for a `jax.jit` of one's own.

    A `pj.TrainStep` has them already. With XLA's defaults it depends on the program
    and the devices whether a stale all-reduce overlaps anything.

    Args:
      mesh: of the devices to compile for.

    Returns:
      What to give as `jax.jit(..., compiler_options=...)`: those that the installed
      compiler takes. Empty on CPU, where a program waits for its collectives.

    >>> from pipejax import data_mesh
    >>> compiler_options(data_mesh(1))
    {}
    """
    return dict(options_for(mesh).kept)


def probe(mesh: Mesh, wanted: dict[str, Any]) -> Options:
    """Tries each option on a program of one addition; logs those refused."""
    kept, dropped = {}, {}
    if wanted and _refusal(mesh, wanted) is None:
        return Options(dict(wanted), {})
    for name, value in wanted.items():
        refusal = _refusal(mesh, {name: value})
        if refusal is None:
            kept[name] = value
        else:
            dropped[name] = refusal
            _log.warning("compiler option %s left out: %s", name, refusal)
    return Options(kept, dropped)


def _refusal(mesh: Mesh, options: dict[str, Any]) -> str | None:
    shape = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(mesh, P()))
    try:
        jax.jit(lambda x: x + 1).lower(shape).compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        return str(error).splitlines()[0]
    return None
