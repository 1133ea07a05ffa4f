"""Models that the devices of a host shard: what stays inside a host, and what crosses.

Between hosts, each device exchanges its shard of the gradients with the devices that
hold the same shard. All devices of a host share its link.
"""

import dataclasses
import math
from typing import NamedTuple

from pipejax._internal.numbers import number

from ._checks import check_elements
from ._cluster import Cluster, Link


class Fsdp(NamedTuple):
    """The traffic of a sharded model inside a host, for each device and step.

    Attributes:
      bytes: Bytes that a device sends to others in its host.
      seconds: The time that they take at least. It is a part of the compute of a step,
        because XLA adds these collectives to the program of a group.
    """

    bytes: float
    seconds: float


def sharded(cluster: Cluster) -> Cluster:
    """Returns the cluster that devices with the same shards form, one in each host.

    Each device of this cluster has a link of its own, with an equal share of its host's
    bandwidth. With `plan`, `scaling` or `simulate`, use it together with the elements
    of a shard, `cluster.shard(elements)`, and with the compute of a whole group.

    Args:
      cluster: Hosts with several devices each, which share the link of their host.

    Examples:
      Eight devices of a host share a link of 25 Gbit/s:

      >>> from pipejax.timing import Cluster, Link, sharded
      >>> inner = Link(2e-6, 300e9)
      >>> cluster = sharded(Cluster(4, Link(20e-6, 3.125e9), 8, inner))
      >>> cluster.devices, f"{1e-6 * cluster.link.bandwidth:.0f} MB/s"
      (1, '391 MB/s')
    """
    link = Link(cluster.link.latency, cluster.link.bandwidth / cluster.devices)
    return dataclasses.replace(cluster, devices=1, inner=None, link=link)


def fsdp(cluster: Cluster, elements: int, itemsize: float = 4) -> Fsdp:
    r"""Returns what a sharded model moves inside a host in a step.

    FSDP gathers each weight twice, for the forward pass and for the backward pass, and
    leaves each device its shard of the summed gradients. With d devices in a host and n
    bytes of parameters, each device thus sends

    $$3 (d-1)/d \; n$$

    bytes inside the host.

    Args:
      cluster: Hosts with several devices each.
      elements: The number of parameters of the whole model.
      itemsize: Bytes of an element as it travels: 4 for float32, 2 for bfloat16.

    Raises:
      ValueError: If `elements` is not a whole number above 0, or `itemsize` is not a
        finite number above 0.

    Examples:
      A model of a billion parameters in bfloat16, on 8 devices with links of 300 GB/s:

      >>> from pipejax.timing import Cluster, Link, fsdp
      >>> cluster = Cluster(4, Link(20e-6, 3.125e9), 8, Link(2e-6, 300e9))
      >>> found = fsdp(cluster, 10**9, itemsize=2)
      >>> f"{1e-9 * found.bytes:.2f} GB, {1e3 * found.seconds:.1f} ms"
      '5.25 GB, 17.5 ms'

    References:
      Rajbhandari et al., ZeRO, 2020, https://arxiv.org/abs/1910.02054
    """
    elements = check_elements("elements", elements)
    if not 0 < number(itemsize) < math.inf:
        raise ValueError(
            "`itemsize` must be a finite number of bytes above 0; got"
            f" {itemsize!r:.40}. Give 4 for float32, or 2 for bfloat16."
        )
    devices, inner = cluster.devices, cluster.inner
    if inner is None:
        return Fsdp(0.0, 0.0)
    sent = 3 * (devices - 1) / devices * itemsize * elements
    return Fsdp(sent, 3 * inner.latency + sent / inner.bandwidth)
