"""Descriptions of GPUs from which XLA can compile for a GPU that is not present.

`target_config` writes the description that `jax.experimental.topologies` takes: a
`GpuTargetConfigProto` in text form. The figures come from XLA's own device files
(openxla/xla, `xla/backends/gpu/target_config/specs`). The A100 is the 80 GB SXM4 module
and the H100 is the 80 GB SXM5 module.
"""

from typing import NamedTuple


class Gpu(NamedTuple):
    """The figures of a GPU in which the GPUs of `GPUS` differ from each other."""

    name: str  # the device kind that JAX reports
    capability: int  # the major version of the CUDA compute capability
    cores: int  # streaming multiprocessors
    fpus: int  # float32 units in each multiprocessor
    clock: float  # GHz
    memory: int  # bytes
    bandwidth: int  # of the device memory, in bytes per second
    l2: int  # bytes of the L2 cache
    shared: int  # bytes of shared memory in each multiprocessor
    links: int  # NVLinks


_H100 = Gpu(
    name="NVIDIA H100 80GB HBM3",
    capability=9,
    cores=132,
    fpus=128,
    clock=1.98,
    memory=84_942_979_072,
    bandwidth=3_352_320_000_000,
    l2=52_428_800,
    shared=233_472,
    links=18,
)

# By the name of the GPU in targets such as `h100:1x8x8`.
GPUS = {
    "a100": Gpu(
        name="NVIDIA A100-SXM4-80GB",
        capability=8,
        cores=108,
        fpus=64,
        clock=1.41,
        memory=85_100_068_864,
        bandwidth=2_039_040_000_000,
        l2=41_943_040,
        shared=167_936,
        links=12,
    ),
    "h100": _H100,
    # An H100 with another memory.
    "h200": _H100._replace(
        name="NVIDIA H200 141GB HBM3e",
        memory=151_397_597_184,
        bandwidth=4_800_000_000_000,
    ),
    "b200": Gpu(
        name="NVIDIA B200",
        capability=10,
        cores=148,
        fpus=128,
        clock=1.965,
        memory=191_514_411_008,
        bandwidth=7_672_320_000_000,
        l2=132_644_864,
        shared=233_472,
        links=18,
    ),
}


def target_config(gpu: Gpu) -> str:
    # CUDA 12.8 and cuDNN 9.10 are the versions of 2025. A thread block can use up to 1
    # KiB less than the shared memory of a multiprocessor.
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {gpu.shared - 1024}
  shared_memory_per_core: {gpu.shared}
  core_count: {gpu.cores}
  fpus_per_core: {gpu.fpus}
  clock_rate_ghz: {gpu.clock}
  device_memory_size: {gpu.memory}
  memory_bandwidth: {gpu.bandwidth}
  l2_cache_size: {gpu.l2}
  cuda_compute_capability {{ major: {gpu.capability} minor: 0 }}
  device_interconnect_info {{ active_links: {gpu.links} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 12 minor: 8 patch: 0 }}
device_description_str: "{gpu.name}"
"""
