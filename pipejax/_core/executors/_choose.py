"""Chooses the executor that runs a step, and says why."""

import logging

from ._config import StepConfig
from ._fused import Fused
from ._host import Host

Executor = Fused | Host

_log = logging.getLogger(__name__)


def choose(name: str, config: StepConfig) -> Executor:
    """Returns the executor of a given name, and logs why.

    `"auto"` stands for the executor that hides communication on these devices: `Host`
    on CPUs of several processes, and `Fused` on accelerators, and on CPUs of a single
    process, which have no network to wait for.
    """
    reason = "asked for"
    if name == "auto":
        name, reason = _automatic(config)
    _log.info("executor %s: %s", name, reason)
    return Host(config, reason) if name == "host" else Fused(config, reason)


def _automatic(config: StepConfig) -> tuple[str, str]:
    devices = config.mesh.devices.flat
    platform = devices[0].platform
    processes = len({device.process_index for device in devices})
    if platform != "cpu":
        return "fused", f"XLA runs collectives beside compute on {platform}"
    if processes == 1:
        return "fused", "one process on CPU, with no network to wait for"
    return "host", f"{processes} processes on CPU, where a collective blocks a program"
