"""Checks that no proxy stands between this process and the coordinator.

gRPC, by which JAX's runtime connects to the coordinator, obeys variables that many
clusters set for downloads. The roll call does not. Without this check, the roll call
would pass, and JAX would then abort all processes after its timeout.
"""

import ipaddress
from collections.abc import Mapping

# The variables that gRPC reads, for proxies and for hosts that it reaches directly. The
# first one that is set decides.
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
_EXCEPTIONS = ("no_grpc_proxy", "no_proxy")


def check_proxy(coordinator: str, environ: Mapping[str, str]) -> None:
    proxy = next((name for name in _PROXIES if name in environ), None)
    # gRPC connects directly if the first variable is no URL of this scheme.
    if proxy is None or not environ[proxy].lower().startswith("http://"):
        return
    host = coordinator.rpartition(":")[0].strip("[]")
    direct = next((name for name in _EXCEPTIONS if name in environ), _EXCEPTIONS[-1])
    given = environ.get(direct, "")
    if any(_covers(each.strip(), host) for each in given.split(",")):
        return
    added = ",".join(filter(None, (given, host)))
    raise ValueError(
        f"`{proxy}` must not be set for the coordinator {coordinator}, because JAX's"
        " runtime would look for the coordinator behind that proxy, and abort all"
        f" processes after its timeout; {direct}={given!r} does not cover the"
        f" coordinator. Set {direct}={added} in the environment of every process, or"
        f" unset {proxy}."
    )


def _covers(entry: str, host: str) -> bool:
    if not entry:
        return False
    try:
        # An entry is the end of a host's name or address, or a subnet. gRPC knows no
        # wildcards.
        return ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False)
    except ValueError:  # one of them is a name or a part of an address
        return host.lower().endswith(entry.lower())
