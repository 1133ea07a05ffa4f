"""Finds a process's place in its job from the variables that its launcher has set.

Under Slurm and MPI, JAX gives every process one accelerator: the one whose number is
the number of the process on its host. If the launcher shows a process only its own
accelerators, or the process is alone on its host, all accelerators that it sees are its
own.
"""

import importlib.util
import os
import re
from collections.abc import Mapping

import jax

from . import _jax_internals
from ._place import Place
from ._share import LAUNCHED

Environment = Mapping[str, str]

_OWN = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_TORCHRUN = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK")
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
# Slurm sets one of these where it shows each task only the GPUs of that task.
_BOUND = ("SLURM_GPUS_PER_TASK", "SLURM_NTASKS_PER_GPU")


def detect(timeout: float = 300.0) -> Place | None:
    """Returns the place of this process in its job, as its launcher has set it.

    It only reads variables. The first source whose variables are present decides:

    1. Your own variables, or those of `pipejax launch`: `JAX_COORDINATOR_ADDRESS`,
       `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`.
    2. torchrun: `MASTER_ADDR`, `MASTER_PORT`, `WORLD_SIZE` and `RANK`. If torchrun
       itself listens at that port, the coordinator takes the next one.
    3. What JAX detects: Slurm, Open MPI, Kubernetes Jobs and JobSets, and Cloud TPUs.
       `JAX_COORDINATOR_ADDRESS` alone replaces the address that JAX detects.
    4. Another MPI, through mpi4py.

    `JAX_LOCAL_DEVICE_IDS` replaces the devices that a launcher gives to a process.

    Args:
      timeout: Seconds that JAX may take to ask a cluster for the coordinator's address.
        Kubernetes and Cloud TPUs are asked.

    Returns:
      The place, or `None` if no launcher has set its variables.

    Raises:
      ValueError: If a launcher's variables are incomplete or not valid, if those of two
        launchers contradict each other, or if mpi4py is needed and not installed.
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
    """Returns which of the accelerators that a process sees are its own, or `None`.

    `local` is its number among the job's `here` processes on the host. `None` stands
    for all accelerators, or an unknown number of processes.
    """
    shown = next((environ[name] for name in _VISIBLE if environ.get(name)), None)
    each = re.search(r"(\d+)$", environ.get(_BOUND[0], ""))
    if here != 1 and shown and each and shown.count(",") >= int(each[1]):
        # With --gpu-bind=none, Slurm shows each task the GPUs of all of them.
        count = int(each[1])
        return tuple(range(local * count, (local + 1) * count))
    bound = any(name in environ for name in _BOUND)
    bound = bound or "gpu" in environ.get("SLURM_TRES_PER_TASK", "")
    if here == 1 or bound or (shown is not None and "," not in shown):
        return None
    return (local,)


def _own(environ: Environment) -> Place | None:
    if not set(_OWN[1:]) & environ.keys():
        return None  # an address alone is combined with what JAX detects
    _check_all(_OWN, environ)
    processes, rank = (_number(name, environ[name]) for name in _OWN[1:])
    return Place(_OWN[1], environ[_OWN[0]], processes, rank, _chosen(environ))


def _torchrun(environ: Environment) -> Place | None:
    if not set(_TORCHRUN[2:]) <= environ.keys():
        return None
    _check_all(_TORCHRUN, environ)
    host = environ["MASTER_ADDR"]
    port, processes, rank = (_number(name, environ[name]) for name in _TORCHRUN[1:])
    devices, local = _chosen(environ), _optional("LOCAL_RANK", environ)
    if devices is None and local is not None:
        devices = own_devices(local, _optional("LOCAL_WORLD_SIZE", environ), environ)
    # torchrun's agent then listens at MASTER_PORT itself, for its key-value store.
    port += environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return Place("torchrun", address, processes, rank, devices)


def _library(environ: Environment, timeout: float) -> Place | None:
    address, processes, rank, devices = _ask_jax(environ, None, timeout)
    mpi = [name for name in _MPI if name in environ]
    if processes is None and mpi:
        if importlib.util.find_spec("mpi4py") is None:
            raise ValueError(
                f"{mpi[0]}={environ[mpi[0]]} was set by an MPI that JAX"
                f" {jax.__version__} reads only through mpi4py, which is not installed."
                f" Install mpi4py, or set {', '.join(_OWN)}."
            )
        address, processes, rank, devices = _ask_jax(environ, "mpi4py", timeout)
    if address is None or processes is None or rank is None:
        return None
    chosen = _chosen(environ)
    if chosen is None and devices:
        chosen = own_devices(devices[0], _on_this_host(environ), environ)
    return Place(_name(environ), address, processes, rank, chosen)


def _ask_jax(
    environ: Environment, method: str | None, timeout: float
) -> _jax_internals.Detected:
    address = environ.get(_OWN[0])
    try:
        return _jax_internals.detect_cluster(address, method, timeout)
    except ValueError as error:
        raise ValueError(
            f"JAX cannot read the variables of {_name(environ)}: {error}. Correct"
            f" them, or set {', '.join(_OWN)}."
        ) from error


def _name(environ: Environment) -> str:
    """Returns the name of the cluster that JAX has detected."""
    # Open MPI comes first, because JAX looks for it first and Slurm may have started
    # its processes. Slurm comes before PMIx, because srun may set the variables of PMIx
    # too.
    names = {
        "OMPI_COMM_WORLD_RANK": "Open MPI",
        "SLURM_PROCID": "Slurm",
        "PMIX_RANK": "MPI",
        "PMI_RANK": "MPI",
        "KUBERNETES_SERVICE_HOST": "Kubernetes",
    }
    return next((name for key, name in names.items() if key in environ), "TPU")


def _on_this_host(environ: Environment) -> int | None:
    """Returns the number of the job's processes on this host, or `None` if unknown."""
    size = _optional("OMPI_COMM_WORLD_LOCAL_SIZE", environ)
    host = _optional("SLURM_NODEID", environ)
    if size is not None or host is None:
        return size
    # "4(x2),3" means four processes on each of two hosts, and three on a third.
    listed = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", listed)
    counts = [int(count) for count, hosts in found for _ in range(int(hosts or 1))]
    return counts[host] if host < len(counts) else None


def _chosen(environ: Environment) -> tuple[int, ...] | None:
    """Returns the numbers in `JAX_LOCAL_DEVICE_IDS`, which replace a launcher's."""
    listed = environ.get("JAX_LOCAL_DEVICE_IDS")
    if not listed:
        return None
    return tuple(_number("JAX_LOCAL_DEVICE_IDS", each) for each in listed.split(","))


def _check_agreement(found: Place, environ: Environment) -> None:
    # Variables that contradict each other are usually left over from another job. They
    # are in order where torchrun or `pipejax launch` was itself started by another
    # launcher. Both mark the processes that they start.
    if "TORCHELASTIC_RUN_ID" in environ and found.launcher == "torchrun":
        return
    if LAUNCHED in environ and found.launcher == _OWN[1]:
        return
    said = [("WORLD_SIZE", "RANK"), ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")]
    if found.launcher != "Open MPI":  # Slurm may have started its processes
        said.append(("PMI_SIZE", "PMI_RANK"))
        if "SLURM_STEP_NODELIST" in environ:  # else this is a batch script
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
            f" {found.processes}, which contradicts {', '.join(differing)}. Unset the"
            f" variables that are left over, or keep only {', '.join(_OWN)}."
        )


def _check_nothing_is_missing(environ: Environment) -> None:
    # Without this check the process would train alone, as if it had no launcher.
    if _OWN[0] in environ:
        _check_all(_OWN, environ)
    if set(_TORCHRUN[:2]) & environ.keys() and set(_TORCHRUN[2:]) & environ.keys():
        _check_all(_TORCHRUN, environ)


def _check_all(names: tuple[str, ...], environ: Environment) -> None:
    missing = [name for name in names if not environ.get(name)]
    if missing:
        there = [name for name in names if name not in missing]
        raise ValueError(
            f"{', '.join(missing)} must be set where {', '.join(there)} are."
        )


def _optional(name: str, environ: Environment) -> int | None:
    return _number(name, environ[name]) if name in environ else None


def _number(name: str, text: str) -> int:
    if not text.strip().isdecimal():
        raise ValueError(f"{name} must be a whole number of at least 0, got {text!r}.")
    return int(text)
