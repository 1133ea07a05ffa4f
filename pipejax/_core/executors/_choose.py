"""Chooses the executor that runs a step, and says why."""

import logging

from ._auto import Auto
from ._config import StepConfig
from ._executor import Executor
from ._fused import Fused
from ._host import Host

_log = logging.getLogger(__name__)

_EXECUTORS: dict[str, type[Fused | Host | Auto]] = {
    "auto": Auto,
    "fused": Fused,
    "host": Host,
}


def choose(name: str, config: StepConfig) -> Executor:
    """Returns the executor of a given name.

    The choice and its reason are logged.

    Args:
      name: `"fused"`, `"host"` or `"auto"`. `"auto"` stands for the executor that hides
        communication on these devices: `Auto` on CPUs of several processes, and `Fused`
        on accelerators. On CPUs of a single process, which have no network to wait for,
        it also stands for `Fused`.

    Returns:
      The executor. Its `reason` says why it was chosen.
    """
    reason = "asked for"
    if name == "auto":
        name, reason = _automatic(config)
    executor: Executor = _EXECUTORS[name](config, reason)
    _log.info("executor %s: %s", executor.name, reason)
    return executor


def _automatic(config: StepConfig) -> tuple[str, str]:
    """Returns the name of the executor that suits the devices, and why."""
    devices = config.mesh.devices.flat
    platform = devices[0].platform
    processes = len({device.process_index for device in devices})
    if platform != "cpu":
        return "fused", f"XLA runs collectives beside compute on {platform}"
    if processes == 1:
        return "fused", "one process on CPU, with no network to wait for"
    return "auto", f"{processes} processes on CPU, where a collective blocks a program"
