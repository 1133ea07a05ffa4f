"""Connects the hosts: a switch, and a cable of a chosen rate to each host."""

import dataclasses
import re
import subprocess

# Host n, counted from 0, has address n + 1. No packet leaves the machine.
SUBNET = "10.77.0"
INTERFACE = "eth0"
MOST = 250

_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


@dataclasses.dataclass(frozen=True)
class Network:
    """The hosts and the rates of their links.

    Attributes:
      rates: The rate of each host's link, such as `"500mbit"`, in both directions.
    """

    rates: tuple[str, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.rates) <= MOST:
            raise ValueError(
                f"`hosts` must be from 1 to {MOST}, got {len(self.rates)}. Each has an"
                " address of one subnet."
            )
        for rate in self.rates:
            bits_per_second(rate)

    @classmethod
    def of(cls, hosts: int, rates: tuple[str, ...]) -> "Network":
        """Makes a network of `hosts` hosts, with one rate for all or one for each."""
        if len(rates) not in (1, hosts):
            raise ValueError(
                f"`rate` must be one for all, or one for each of {hosts} hosts; got"
                f" {len(rates)}: {' '.join(rates)}."
            )
        return cls(rates * hosts if len(rates) == 1 else rates)

    @property
    def size(self) -> int:
        """Returns the number of hosts."""
        return len(self.rates)

    def hosts_file(self) -> str:
        """Returns the text of `/etc/hosts`, with the address of every host.

        Hosts find one another by this file, and Gloo finds the interface to use.
        """
        lines = [f"{address(host)} {name(host)}" for host in range(self.size)]
        return "\n".join(["127.0.0.1 localhost", *lines, ""])


def name(host: int) -> str:
    """Returns the name of a host, by its number from 0."""
    return f"host{host}"


def address(host: int) -> str:
    """Returns the address of a host, by its number from 0."""
    return f"{SUBNET}.{host + 1}"


def bits_per_second(rate: str) -> float:
    """Returns the bits per second of a rate in the notation of `tc`.

    >>> bits_per_second("500mbit")
    500000000.0
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(bit|kbit|mbit|gbit)", rate)
    if not found or float(found[1]) <= 0:
        raise ValueError(
            f"`rate` must be a number and bit, kbit, mbit or gbit, got {rate!r}. For"
            " example 500mbit."
        )
    return float(found[1]) * _UNITS[found[2]]


def shown_rate(rate: str) -> str:
    """Returns a rate in the notation of `tc` as it is written in text.

    >>> shown_rate("500mbit")
    '500 Mbit/s'
    """
    bits = bits_per_second(rate)
    unit = next(unit for unit in ("gbit", "mbit", "kbit", "bit") if rate.endswith(unit))
    return f"{bits / _UNITS[unit]:g} {unit.capitalize() if unit != 'bit' else unit}/s"


def switch() -> None:
    """Makes the switch, to which all cables lead, in the present network namespace."""
    _run("ip", "link", "set", "lo", "up")
    _run("ip", "link", "add", "name", "switch", "type", "bridge")
    _run("ip", "link", "set", "switch", "up")


def connect(host: int, process: int, rate: str) -> None:
    """Makes a cable to the network namespace of a process, limited at both ends."""
    port = f"port{host}"
    inside = ("nsenter", "--target", str(process), "--net", "--uts")
    peer = ("peer", "name", INTERFACE, "netns", str(process))
    _run("ip", "link", "add", port, "type", "veth", *peer)
    _limit(port, rate)
    _run("ip", "link", "set", port, "master", "switch", "up")
    _run(*inside, "hostname", name(host))
    _run(*inside, "ip", "link", "set", "lo", "up")
    _run(*inside, "ip", "addr", "add", f"{address(host)}/24", "dev", INTERFACE)
    _limit(INTERFACE, rate, inside)
    _run(*inside, "ip", "link", "set", INTERFACE, "up")


def bucket(rate: str) -> tuple[str, ...]:
    """Returns the arguments of `tc qdisc` for the limit of a link: a token bucket."""
    return ("tbf", "rate", rate, "burst", str(_burst(rate)), "latency", "50ms")


def _burst(rate: str) -> int:
    # After a pause, the data of 4 ms may leave at once, as from the queue of a network
    # card. With a smaller bucket, the link would lose the time by which the kernel is
    # late while hosts compute.
    return max(2**14, int(bits_per_second(rate) / 8 * 4e-3))


def _limit(interface: str, rate: str, inside: tuple[str, ...] = ()) -> None:
    """Limits the rate at which data leave by an interface."""
    _run(*inside, "tc", "qdisc", "add", "dev", interface, "root", *bucket(rate))
    # Packets that a network card would segment must fit into the bucket. Otherwise,
    # the kernel segments them, on the cores of the hosts.
    whole = str(min(2**16, _burst(rate) // 2))
    _run(*inside, "ip", "link", "set", interface, "gso_max_size", whole)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
