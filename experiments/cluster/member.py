"""What a program on one of the hosts asks: to be joined, and what its link carried."""

import os
import pathlib
from typing import NamedTuple

import jax

from ._network import INTERFACE, SUBNET


def join() -> int:
    """Joins the hosts to one JAX runtime; returns this one's rank.

    Raises:
      RuntimeError: outside a cluster.
    """
    if not os.environ.get("MASTER_ADDR", "").startswith(SUBNET):
        raise RuntimeError(
            "This runs on the hosts of a cluster: python -m experiments.cluster --hosts"
            " 4 --rate 500mbit -- python -m ..."
        )
    rank = int(os.environ["RANK"])
    jax.distributed.initialize(
        f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
        int(os.environ["WORLD_SIZE"]),
        rank,
    )
    return rank


class Counters(NamedTuple):
    """Bytes over this host's link, frames and all.

    Attributes:
      sent: since the link is up.
      received: likewise.
    """

    sent: int
    received: int

    def since(self, before: "Counters") -> "Counters":
        """What has gone over it since."""
        return Counters(self.sent - before.sent, self.received - before.received)


def wire() -> Counters:
    """What the interface has counted so far."""
    table = pathlib.Path("/proc/self/net/dev").read_text()
    for line in table.splitlines():
        interface, _, numbers = line.partition(":")
        if interface.strip() == INTERFACE:
            found = numbers.split()
            return Counters(sent=int(found[8]), received=int(found[0]))
    raise RuntimeError(f"There is no {INTERFACE} here: not on a host of a cluster.")
