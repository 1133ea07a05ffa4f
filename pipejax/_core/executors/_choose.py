"""Chooses the executor that runs a step, and says why."""

import logging

from ._config import StepConfig
from ._fused import Fused
from ._fused_rounds import FusedRounds
from ._host import Host
from ._host_rounds import HostRounds
from ._round_config import RoundConfig

Executor = Fused | Host

_log = logging.getLogger(__name__)


def choose(name: str, config: StepConfig) -> Executor:
    """Returns the executor of a given name, and logs why.

    `"auto"` stands for the executor that hides communication on these devices: `Host`
    on CPUs of several processes, and `Fused` on accelerators, and on CPUs of a single
    process, which have no network to wait for.
    """
    name, reason = _named(name, config)
    return Host(config, reason) if name == "host" else Fused(config, reason)


def choose_rounds(name: str, config: RoundConfig) -> FusedRounds | HostRounds:
    """Returns the executor of local steps of a given name, as `choose`."""
    name, reason = _named(name, config.inner)
    return (HostRounds if name == "host" else FusedRounds)(config, reason)


def _named(name: str, config: StepConfig) -> tuple[str, str]:
    """Returns the name of an executor, and why it is taken."""
    if name == "auto":
        name, reason = _automatic(config)
    elif name == "host" and config.mesh.size == 1:
        name, reason = "fused", "one device, which exchanges nothing"
    else:
        reason = "asked for"
    _log.info("executor %s: %s", name, reason)
    return name, reason


def _automatic(config: StepConfig) -> tuple[str, str]:
    devices = config.mesh.devices.flat
    platform = devices[0].platform
    processes = len({device.process_index for device in devices})
    if platform != "cpu":
        return "fused", f"XLA runs collectives beside compute on {platform}"
    if processes == 1:
        return "fused", "one process on CPU, with no network to wait for"
    return "host", f"{processes} processes on CPU, where a collective blocks a program"
