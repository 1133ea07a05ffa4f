"""What XLA's compiler wants to know of a GPU that is not there.

Each is a `GpuTargetConfigProto` in text form, as `jax.experimental.topologies` takes
it. The figures are those that XLA's own device files give (openxla/xla,
`xla/backends/gpu/target_config/specs`); A100 is the 80 GB SXM4, H100 the 80 GB SXM5.
"""

from typing import NamedTuple


class Gpu(NamedTuple):
    """What differs from one to the next.

    Attributes:
      name: device kind, as JAX reports it.
      capability: CUDA compute capability, major.
      cores: streaming multiprocessors.
      fpus: float32 units of each.
      clock: GHz.
      memory: bytes.
      bandwidth: of the memory, bytes/s.
      l2: cache, bytes.
      shared: memory of one multiprocessor, bytes; a block may have 1 KiB less.
      links: NVLinks.
    """

    name: str
    capability: int
    cores: int
    fpus: int
    clock: float
    memory: int
    bandwidth: int
    l2: int
    shared: int
    links: int


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
    "h100": Gpu(
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
    ),
    "h200": Gpu(
        name="NVIDIA H200 141GB HBM3e",
        capability=9,
        cores=132,
        fpus=128,
        clock=1.98,
        memory=151_397_597_184,
        bandwidth=4_800_000_000_000,
        l2=52_428_800,
        shared=233_472,
        links=18,
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
    """The text proto of `gpu`; the CUDA and cuDNN it names are those of 2025."""
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
