"""A cluster that has not been calibrated: what its speeds are assumed to be.

Codecs and sums read and write memory, and do little else. So their speed follows from
that of the memory, B bytes a second, by how often they pass over the vector:

  `speed = B / 2 / passes`, in bytes of float32 a second

The half is what codecs on a CPU core reach at least: int8 0.50 and bf16 0.62 of the
bytes that a copy reads and writes in the same time (docs/compression.md, "How fast").

- bf16 reads 4 bytes and writes 2: 1.5 passes, and as many to decode
- int8 reads 4 and writes 1: 1.25, and as many to decode
- power_sgd with error feedback adds what is due (3), multiplies twice (2), multiplies
  out what it sends (1) and subtracts it (3): 9, and 1 to decode
- a sum reads two vectors and writes one: 3
"""

from typing import NamedTuple

from pipejax.gpus import GPUS

from ._cluster import Cluster, CodecSpeed, Link, Shares

LATENCY = 50e-6
"""Seconds of a message between hosts, by TCP over Ethernet in one building."""
SYNCHRONISATION = 100e-6
"""Seconds to launch a collective and to wait for the last to come."""
INSIDE = 10e-6
"""Seconds of a message between devices of one host."""

_SUM = 3.0
_PASSES = {"bf16": (1.5, 1.5), "int8": (1.25, 1.25), "power_sgd": (9.0, 1.0)}


class Device(NamedTuple):
    """What is assumed of a kind of device.

    Attributes:
      name: in words, with the source of the figures.
      memory: bytes read and written a second.
      inner: bytes a second to the other devices of its host, in one direction.
      shares: of a link's bandwidth, by who sends to whom.
    """

    name: str
    memory: float
    inner: float
    shares: Shares = Shares()


# A copy of 64 MiB in 6.95 ms, with huge pages: experiments/results/codec_speed.json.
_CORE = 19.3e9
# With Gloo, medians of the fits in experiments/results/prediction.json.
_GLOO = Shares(pair=0.60, shift=0.94, shuffle=0.72)
# Of one link in one direction: NVLink 3 and 4, and from Blackwell on NVLink 5.
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
            f"{gpu.name}, by its data sheet",
            gpu.bandwidth,
            gpu.links * _NVLINK[gpu.capability],
        )
        for kind, gpu in GPUS.items()
    },
}


def assumed(
    hosts: int,
    bandwidth: float,
    devices: int = 1,
    *,
    device: str = "cpu",
    latency: float = LATENCY,
) -> Cluster:
    """Makes a cluster from what is known before anything is measured on it.

    Codecs pass over the vector a number of times, at half of the memory's speed:
    `B / 2 / passes` bytes of float32 a second. bf16 takes 1.5 passes, int8 1.25,
    power_sgd with error feedback 9 to encode and 1 to decode, a sum 3. A collective
    takes 100 microseconds beside its messages. On CPUs devices that send and receive at
    once have the shares of a link that Gloo gives them, on GPUs all of it. `calibrate`
    measures all of this.

    Args:
      hosts: how many.
      bandwidth: of a host's link in one direction, bytes a second.
      devices: of each host.
      device: which, of `pj.timing.DEVICES`. A CPU core is slower than any accelerator.
      latency: of a message between hosts, seconds.

    Returns:
      The cluster, with the speeds of the codecs bf16, int8 and power_sgd.

    Raises:
      ValueError: for a device of which nothing is known, or a number that no cluster
        has.

    >>> cluster = assumed(4, 125e6, device="h100")
    >>> f"{1e-12 * cluster.codec('int8').encode:.2f} TB/s"
    '1.34 TB/s'
    """
    if device not in DEVICES:
        raise ValueError(
            f"`device` must be one of {', '.join(DEVICES)}, got {device!r}. Measure the"
            " speeds of any other: pj.timing.calibrate, `pipejax calibrate`."
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
