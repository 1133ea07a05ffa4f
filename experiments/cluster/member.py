"""Lets a program on a host join the cluster, read the link, and write its answer."""

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
    """Joins the hosts to one JAX runtime, and returns the rank of this host.

    Raises:
      RuntimeError: If the program does not run on a host of a cluster.
    """
    if not os.environ.get("MASTER_ADDR", "").startswith(SUBNET):
        raise RuntimeError(
            "This runs on the hosts of a cluster: python -m experiments.cluster --hosts"
            " 4 --rate 500mbit -- python -m ..."
        )
    place = launch.initialize()
    return place.rank if place else 0


def barrier() -> None:
    """Waits until every host has called this.

    No other communication may be under way.
    """
    multihost_utils.sync_global_devices("member")


def largest(values: Sequence[float]) -> list[float]:
    """Returns the largest of each value over all hosts, the same on every host."""
    every = multihost_utils.process_allgather(np.array(values, np.float64))
    return every.reshape(jax.process_count(), -1).max(axis=0).tolist()


def answer(figures: Any, out: pathlib.Path | None) -> None:
    """Writes figures as JSON to the file that `cluster.ask` reads, or prints them."""
    text = json.dumps(figures, indent=2)
    if out is None:
        print(text)
    else:
        out.write_text(text + "\n")


def cores() -> float:
    """Returns the time for which a core of the machine has worked so far, in seconds.

    The value is a mean over all cores. Every host reads the same value, since the hosts
    share the machine. It comprises user time, kernel time with the interrupts of the
    network, and the time that the hypervisor took. The kernel counts in hundredths of a
    second.
    """
    total, *_ = pathlib.Path("/proc/stat").read_text().splitlines()
    user, nice, system, _, _, *others = map(int, total.split()[1:9])
    ticks = user + nice + system + sum(others)
    return ticks / os.sysconf("SC_CLK_TCK") / (os.cpu_count() or 1)


class Counters(NamedTuple):
    """The bytes that have passed over this host's link, headers included.

    Attributes:
      sent: The bytes sent since the link was made.
      received: The bytes received since the link was made.
    """

    sent: int
    received: int

    def since(self, before: "Counters") -> "Counters":
        """Returns the bytes that have passed since `before`."""
        return Counters(self.sent - before.sent, self.received - before.received)


def wire() -> Counters:
    """Returns the bytes that the interface has counted so far."""
    table = pathlib.Path("/proc/self/net/dev").read_text()
    for line in table.splitlines():
        interface, _, numbers = line.partition(":")
        if interface.strip() == INTERFACE:
            found = numbers.split()
            return Counters(sent=int(found[8]), received=int(found[0]))
    raise RuntimeError(f"There is no {INTERFACE} here: not on a host of a cluster.")
