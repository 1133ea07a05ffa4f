"""Who started this process, by the variables that launchers leave behind.

The first of these that is there:

1. variables of one's own, and of `pipejax launch`: `JAX_COORDINATOR_ADDRESS`,
   `JAX_NUM_PROCESSES`, `JAX_PROCESS_ID`
2. torchrun: `MASTER_ADDR`, `MASTER_PORT`, `WORLD_SIZE`, `RANK`; the port after that
   one where torchrun itself listens there
3. what JAX itself detects: Slurm, Open MPI, Kubernetes Jobs and JobSets, TPUs of
   Google's clouds
4. another MPI, through mpi4py
5. none: one process

JAX has a process under Slurm and MPI drive one accelerator, whose number is the
process's own on its host. That is wrong where the launcher shows it no other, and where
it is the only process there: then all that it sees are its own (`own_devices`).
"""

import importlib.util
import os
import re
from collections.abc import Mapping
from typing import Any

import jax

# JAX has no public way to ask what it detects without joining at once.
from jax._src.clusters import ClusterEnv

from ._place import Place
from ._share import LAUNCHED

Environment = Mapping[str, str]

_OWN = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_TORCHRUN = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK")
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
# Where each task is shown its own GPUs alone.
_BOUND = ("SLURM_GPUS_PER_TASK", "SLURM_NTASKS_PER_GPU")


def detect(timeout: float = 300.0) -> Place | None:
    """Where this process stands, as its launcher says; `None` without one.

    Args:
      timeout: seconds to look up what a cluster has to be asked for.

    Raises:
      ValueError: for variables of which some are missing, or are no numbers, or for two
        launchers that say different things.
    """
    environ = os.environ
    found = _own(environ) or _torchrun(environ) or _library(environ, timeout)
    if found is None:
        _check_nothing_is_missing(environ)
    else:
        _check_agreement(found, environ)
    return found


def own_devices(
    local: int, here: int | None, environ: Environment
) -> tuple[int, ...] | None:
    """Which of the accelerators that a process sees are its own; `None` is all.

    Args:
      local: which it is of the job's processes on its host.
      here: how many these are, if that is known.
      environ: what its launcher left.
    """
    shown = next((environ[name] for name in _VISIBLE if environ.get(name)), None)
    bound = any(name in environ for name in _BOUND)
    bound = bound or "gpu" in environ.get("SLURM_TRES_PER_TASK", "")
    if here == 1 or bound or (shown is not None and "," not in shown):
        return None
    return (local,)


def _own(environ: Environment) -> Place | None:
    if not set(_OWN[1:]) & environ.keys():
        return None  # the address alone goes with what JAX detects
    address, processes, rank = _all_of(_OWN, environ)
    return Place(
        "JAX_NUM_PROCESSES",
        address,
        _number(_OWN[1], processes),
        _number(_OWN[2], rank),
        _chosen(environ),
    )


def _torchrun(environ: Environment) -> Place | None:
    if not set(_TORCHRUN[2:]) <= environ.keys():
        return None
    host, port, processes, rank = _all_of(_TORCHRUN, environ)
    devices = _chosen(environ)
    if devices is None and "LOCAL_RANK" in environ:
        here = environ.get("LOCAL_WORLD_SIZE")
        devices = own_devices(
            _number("LOCAL_RANK", environ["LOCAL_RANK"]),
            None if here is None else _number("LOCAL_WORLD_SIZE", here),
            environ,
        )
    # torchrun's agent listens at that port itself, for a store of its own.
    taken = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    number = _number("MASTER_PORT", port) + taken
    return Place(
        "torchrun",
        f"[{host}]:{number}" if ":" in host else f"{host}:{number}",
        _number("WORLD_SIZE", processes),
        _number("RANK", rank),
        devices,
    )


def _library(environ: Environment, timeout: float) -> Place | None:
    address, processes, rank, devices = _ask_jax(environ, None, timeout)
    mpi = [name for name in _MPI if name in environ]
    if processes is None and mpi:
        if importlib.util.find_spec("mpi4py") is None:
            raise ValueError(
                f"{mpi[0]}={environ[mpi[0]]} comes from an MPI that JAX"
                f" {jax.__version__} asks through mpi4py, which is not installed."
                f" Install it, or set {', '.join(_OWN)}."
            )
        address, processes, rank, devices = _ask_jax(environ, "mpi4py", timeout)
    if address is None or processes is None or rank is None:
        return None
    chosen = _chosen(environ)
    if chosen is None and devices:
        chosen = own_devices(devices[0], _on_this_host(environ), environ)
    return Place(_name(environ), address, processes, rank, chosen)


def _ask_jax(environ: Environment, method: str | None, timeout: float) -> Any:
    address = environ.get("JAX_COORDINATOR_ADDRESS")
    try:
        return ClusterEnv.auto_detect_unset_distributed_params(
            address, None, None, None, method, int(timeout)
        )
    except ValueError as error:
        raise ValueError(
            f"JAX cannot make out the variables of {_name(environ)}: {error}. Mend"
            f" them, or set {', '.join(_OWN)}."
        ) from error


def _name(environ: Environment) -> str:
    """Of what JAX has detected; it asks Open MPI first, and srun may set PMIx's too."""
    names = {
        "OMPI_COMM_WORLD_RANK": "Open MPI",
        "SLURM_PROCID": "Slurm",
        "PMIX_RANK": "MPI",
        "PMI_RANK": "MPI",
        "KUBERNETES_SERVICE_HOST": "Kubernetes",
    }
    return next((name for key, name in names.items() if key in environ), "TPU")


def _on_this_host(environ: Environment) -> int | None:
    """How many of the job's processes, as Open MPI and Slurm say."""
    if "OMPI_COMM_WORLD_LOCAL_SIZE" in environ:
        return _number(
            "OMPI_COMM_WORLD_LOCAL_SIZE", environ["OMPI_COMM_WORLD_LOCAL_SIZE"]
        )
    # 4(x2),3 is four on each of two hosts, then three.
    listed = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", listed)
    counts = [int(count) for count, hosts in found for _ in range(int(hosts or 1))]
    host = int(environ.get("SLURM_NODEID", len(counts)))
    return counts[host] if host < len(counts) else None


def _chosen(environ: Environment) -> tuple[int, ...] | None:
    """Accelerators by JAX's own variable, which goes before what others say."""
    listed = environ.get("JAX_LOCAL_DEVICE_IDS")
    if not listed:
        return None
    return tuple(_number("JAX_LOCAL_DEVICE_IDS", each) for each in listed.split(","))


def _check_agreement(found: Place, environ: Environment) -> None:
    """That no variables are left over from somewhere else.

    One launcher may be started by another: torchrun and `pipejax launch` say so.
    """
    if "TORCHELASTIC_RUN_ID" in environ and found.launcher == "torchrun":
        return
    if LAUNCHED in environ and found.launcher == _OWN[1]:
        return
    said = [("WORLD_SIZE", "RANK"), ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")]
    if found.launcher != "Open MPI":  # whose own processes Slurm may have started
        said.append(("PMI_SIZE", "PMI_RANK"))
        if "SLURM_STEP_NODELIST" in environ:  # else it is a batch script, and no step
            said.append(("SLURM_NTASKS", "SLURM_PROCID"))
    differing = [
        f"{name}={environ[name]}"
        for names in said
        for name, own in zip(names, (found.processes, found.rank), strict=True)
        if name in environ and _number(name, environ[name]) != own
    ]
    if differing:
        raise ValueError(
            f"{found.launcher} says that this is process {found.rank} of"
            f" {found.processes}, against {', '.join(differing)}. Unset what is left"
            f" over, or set {', '.join(_OWN)} alone."
        )


def _check_nothing_is_missing(environ: Environment) -> None:
    """That no process takes itself for the only one because a variable is not set."""
    if _OWN[0] in environ:
        _all_of(_OWN, environ)
    if set(_TORCHRUN[:2]) & environ.keys() and set(_TORCHRUN[2:]) & environ.keys():
        _all_of(_TORCHRUN, environ)


def _all_of(names: tuple[str, ...], environ: Environment) -> list[str]:
    missing = [name for name in names if not environ.get(name)]
    if missing:
        there = [name for name in names if name not in missing]
        raise ValueError(
            f"{', '.join(missing)} must be set where {', '.join(there)} are."
        )
    return [environ[name] for name in names]


def _number(name: str, text: str) -> int:
    if not text.strip().isdecimal():
        raise ValueError(f"{name} must be a whole number of at least 0, got {text!r}.")
    return int(text)
