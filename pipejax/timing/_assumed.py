"""Assumed speeds of a cluster that has not been calibrated.

Most encoding, decoding and adding does little besides reading and writing memory. Its
speed therefore follows from the speed of the memory. If the memory reads and writes M
bytes per second, work that passes q times over a vector has the speed

$$s = M / (2 q)$$

in bytes of float32 per second. One pass reads or writes 4 bytes for each element.

The factor 1/2 is a lower bound, measured on a CPU core. In the time in which a copy
moves 1 byte, int8 and int4 move at least 0.50 bytes and bf16 at least 0.67, in encoding
and in decoding (docs/benchmarks/compression.md). Under fp8, a CPU core spends more time
on converting numbers than on moving bytes. There, q is therefore the number of passes
that take the measured time. Accelerators may be faster.
"""

from typing import NamedTuple

from pipejax._internal.gpus import GPUS

from ._cluster import Cluster, CodecSpeed, Link, Shares

LATENCY = 50e-6
"""Assumed latency in seconds between hosts: TCP over Ethernet in one building."""
SYNCHRONISATION = 100e-6
"""Assumed seconds to launch a collective and to wait for the last device."""
INSIDE = 10e-6
"""Assumed latency in seconds between two devices of one host."""

_SUM = 3.0  # reads two vectors and writes one
# The passes q to encode and to decode.
_PASSES = {
    "bf16": (1.5, 1.5),  # reads 4 bytes and writes 2, or the reverse
    "int8": (1.25, 1.25),  # reads 4 bytes and writes 1, or the reverse
    "fp8_e4m3": (2.2, 1.45),  # measured
    # With error feedback: encodes the sum of vector and residual (2.25), and subtracts
    # from it what the payload decodes to (4.25). Codes take as long as those of int8.
    "int4": (2.25 + 4.25, 1.25),
    # With error feedback: adds the residual (3), multiplies the matrices twice (2),
    # multiplies out the payload (1) and subtracts the product (3).
    "power_sgd": (3 + 2 + 1 + 3.0, 1.0),
}


class Device(NamedTuple):
    """The assumed speeds of one kind of device, in bytes per second."""

    name: str  # in words, with the source of its figures
    memory: float  # reads and writes
    inner: float  # to the other devices of its host, in one direction
    shares: Shares = Shares()


# A copy of 64 MiB took 8.06 ms with huge pages: experiments/results/codec_speed.json.
_CORE = 16.65e9
# Medians of the fits in experiments/results/prediction.json, measured with Gloo.
_GLOO = Shares(pair=0.60, shift=0.94, shuffle=0.72)
# Bytes per second of one NVLink in one direction, by the major compute capability of
# the GPU: NVLink 3 and NVLink 4, and NVLink 5 from Blackwell on.
_NVLINK = {8: 25e9, 9: 25e9, 10: 50e9}

DEVICES = {
    "cpu": Device(
        "one CPU core, by experiments/results/codec_speed.json",
        _CORE,
        _CORE / 2,
        _GLOO,
    ),
    **{
        kind: Device(
            f"{gpu.name}, as XLA knows it",
            gpu.bandwidth,
            gpu.links * _NVLINK[gpu.capability],
        )
        for kind, gpu in GPUS.items()
    },
}
"""The devices that `assumed` knows, by name, with their assumed speeds."""


def assumed(
    hosts: int,
    bandwidth: float,
    devices: int = 1,
    *,
    device: str = "cpu",
    latency: float = LATENCY,
) -> Cluster:
    """Makes a cluster from assumed speeds, before anything is measured on it.

    Use `pj.timing.calibrate` instead where the cluster is available: it measures what
    this function assumes. The assumptions are:

    - Codecs and additions run at half of the memory's speed. With M bytes per second of
      memory and q passes over the vector, they process

      $$s = M / (2 q)$$

      bytes of float32 per second. Encoding and decoding take q = 1.5 and 1.5 passes
      with bf16, 1.25 and 1.25 with int8, 2.2 and 1.45 with fp8_e4m3, 6.5 and 1.25
      with int4 and error feedback, and 9 and 1 with power_sgd and error feedback.
      An addition takes 3.
    - A collective takes 100 microseconds in addition to its messages.
    - A message between two devices of one host has a latency of 10 microseconds.
    - On CPUs, devices that send and receive at the same time get the shares of a link
      that were measured with Gloo. On GPUs they get all of it in each direction.

    Args:
      hosts: The number of hosts.
      bandwidth: The bandwidth of a host's link in one direction, in bytes per second.
      devices: The number of devices on each host.
      device: The kind of device, a key of `pj.timing.DEVICES`. The default is one CPU
        core, which is slower than any accelerator.
      latency: The latency of a message between hosts, in seconds.

    Returns:
      The cluster, with the speeds of the codecs bf16, int8, fp8_e4m3, int4 and
      power_sgd.

    Raises:
      ValueError: If `device` is not a key of `pj.timing.DEVICES`, or another argument
        is not valid for a `pj.timing.Cluster`.

    Examples:
      >>> import pipejax as pj
      >>> cluster = pj.timing.assumed(4, 125e6, device="h100")
      >>> f"{1e-12 * cluster.codec('int8').encode:.2f} TB/s"
      '1.34 TB/s'
    """
    if device not in DEVICES:
        raise ValueError(
            f"`device` must be one of {', '.join(DEVICES)}, got {device!r}. Measure the"
            " speeds of any other device with pj.timing.calibrate or `pipejax"
            " calibrate`."
        )
    chosen = DEVICES[device]
    half = chosen.memory / 2
    return Cluster(
        hosts,
        Link(latency, bandwidth),
        devices,
        inner=Link(INSIDE, chosen.inner) if devices > 1 else None,
        reduction=half / _SUM,
        synchronisation=SYNCHRONISATION,
        shares=chosen.shares,
        codecs={
            name: CodecSpeed(half / encode, half / decode)
            for name, (encode, decode) in _PASSES.items()
        },
    )
