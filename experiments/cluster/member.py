"""What a program on one of the hosts needs: to join, to read its link, to answer."""

import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from pipejax import launch

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
    place = launch.initialize()
    return place.rank if place else 0


def barrier() -> None:
    """Waits until every host is here; nothing else may be in flight."""
    multihost_utils.sync_global_devices("member")


def largest(values: Sequence[float]) -> list[float]:
    """Of all hosts, value by value; the same on each of them."""
    every = multihost_utils.process_allgather(np.array(values, np.float64))
    return every.reshape(jax.process_count(), -1).max(axis=0).tolist()


def answer(figures: Any, out: pathlib.Path | None) -> None:
    """Writes JSON where `cluster.ask` looks for it, or prints it."""
    text = json.dumps(figures, indent=2)
    if out is None:
        print(text)
    else:
        out.write_text(text + "\n")


def cores() -> float:
    """Seconds for which the machine's cores have worked so far, over their number.

    Every host reads the same, since they share the machine: its user and kernel time,
    the network's interrupts included, and what the hypervisor took. The kernel counts
    in hundredths of a second.
    """
    total, *_ = pathlib.Path("/proc/stat").read_text().splitlines()
    user, nice, system, _, _, *others = map(int, total.split()[1:9])
    ticks = user + nice + system + sum(others)
    return ticks / os.sysconf("SC_CLK_TCK") / (os.cpu_count() or 1)


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
