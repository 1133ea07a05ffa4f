"""What joins the hosts: a switch, and a cable of a chosen rate to each of them."""

import dataclasses
import re
import subprocess

# Of which a host's address is the n-th; no packet leaves the machine.
SUBNET = "10.77.0"
INTERFACE = "eth0"
MOST = 250

_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


@dataclasses.dataclass(frozen=True)
class Network:
    """Hosts and the rates of their links.

    Attributes:
      rates: of each host's link, the same in both directions: `"500mbit"`.
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
        """So many hosts with one rate for all, or with one rate each."""
        if len(rates) not in (1, hosts):
            raise ValueError(
                f"`rate` must be one for all, or one for each of {hosts} hosts; got"
                f" {len(rates)}: {' '.join(rates)}."
            )
        return cls(rates * hosts if len(rates) == 1 else rates)

    @property
    def size(self) -> int:
        """Hosts."""
        return len(self.rates)

    def hosts_file(self) -> str:
        """By it a host finds others, and Gloo the interface it is to use."""
        lines = [f"{address(host)} {name(host)}" for host in range(self.size)]
        return "\n".join(["127.0.0.1 localhost", *lines, ""])


def name(host: int) -> str:
    """Of the n-th host."""
    return f"host{host}"


def address(host: int) -> str:
    """Of the n-th host."""
    return f"{SUBNET}.{host + 1}"


def bits_per_second(rate: str) -> float:
    """Of a rate as `tc` takes it.

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


def switch() -> None:
    """Makes what all cables go to, in the network namespace this runs in."""
    _run("ip", "link", "set", "lo", "up")
    _run("ip", "link", "add", "name", "switch", "type", "bridge")
    _run("ip", "link", "set", "switch", "up")


def connect(host: int, process: int, rate: str) -> None:
    """A cable to the network namespace of a process, limited at both of its ends."""
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
    """What limits a link, as `tc qdisc` takes it: a token bucket."""
    return ("tbf", "rate", rate, "burst", str(_burst(rate)), "latency", "50ms")


def _burst(rate: str) -> int:
    # What goes at once after a pause, as from the queue of a network card: of 4 ms.
    # With less, what the kernel is too late for while hosts compute would be lost.
    return max(2**14, int(bits_per_second(rate) / 8 * 4e-3))


def _limit(interface: str, rate: str, inside: tuple[str, ...] = ()) -> None:
    """What leaves by this interface, at most so fast."""
    _run(*inside, "tc", "qdisc", "add", "dev", interface, "root", *bucket(rate))
    # Packets that a network card would cut up must fit into the bucket, or the kernel
    # cuts them up, on the hosts' cores.
    whole = str(min(2**16, _burst(rate) // 2))
    _run(*inside, "ip", "link", "set", interface, "gso_max_size", whole)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
