"""Tests the place that is found from the variables of each launcher."""

import importlib.util

import pytest
from jax._src.clusters import ClusterEnv

from pipejax import launch
from pipejax.cli import main

from .helpers import OPEN_MPI, OWN, SLURM, TORCHRUN

SLURM_PLACE = ("Slurm", "gpu07:61440", 7, 4)
OWN_PLACE = ("JAX_NUM_PROCESSES", "10.0.0.1:1234", 4, 3)
TORCHRUN_PLACE = ("torchrun", "10.0.0.1:1234", 4, 3)


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        (OWN, (*OWN_PLACE, None)),
        (OWN | {"JAX_LOCAL_DEVICE_IDS": "2,3"}, (*OWN_PLACE, (2, 3))),
        (TORCHRUN, (*TORCHRUN_PLACE, (1,))),
        (
            TORCHRUN | {"MASTER_ADDR": "fe80::1"},
            ("torchrun", "[fe80::1]:1234", 4, 3, (1,)),
        ),
        (
            TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"},
            ("torchrun", "10.0.0.1:1235", 4, 3, (1,)),
        ),
        # A process that is alone on its host has all devices that it sees.
        (
            TORCHRUN | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
            (*TORCHRUN_PLACE, None),
        ),
        (TORCHRUN | {"CUDA_VISIBLE_DEVICES": "1"}, (*TORCHRUN_PLACE, None)),
        (TORCHRUN | {"CUDA_VISIBLE_DEVICES": "2,3"}, (*TORCHRUN_PLACE, (1,))),
        (TORCHRUN | {"JAX_LOCAL_DEVICE_IDS": "0"}, (*TORCHRUN_PLACE, (0,))),
        (SLURM, (*SLURM_PLACE, (0,))),
        # With `--gpus-per-task`, each process sees only its own GPU, as number 0.
        (SLURM | {"SLURM_GPUS_PER_TASK": "2"}, (*SLURM_PLACE, None)),
        # With `--gpu-bind=none`, each process sees those of all.
        (
            SLURM | {"SLURM_GPUS_PER_TASK": "1", "CUDA_VISIBLE_DEVICES": "0,1"},
            (*SLURM_PLACE, (0,)),
        ),
        (
            SLURM
            | {"SLURM_GPUS_PER_TASK": "h100:2", "CUDA_VISIBLE_DEVICES": "0,1,2,3"},
            (*SLURM_PLACE, (0, 1)),
        ),
        (
            SLURM | {"SLURM_GPUS_PER_TASK": "2", "CUDA_VISIBLE_DEVICES": "0,1"},
            (*SLURM_PLACE, None),
        ),
        (SLURM | {"SLURM_TRES_PER_TASK": "cpu=2,gres/gpu=1"}, (*SLURM_PLACE, None)),
        (SLURM | {"SLURM_TRES_PER_TASK": "cpu=2"}, (*SLURM_PLACE, (0,))),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x2),1"}, (*SLURM_PLACE, None)),
        (SLURM | {"CUDA_VISIBLE_DEVICES": "0"}, (*SLURM_PLACE, None)),
        # The variables of `srun --mpi=pmix`.
        (SLURM | {"PMIX_RANK": "4"}, (*SLURM_PLACE, (0,))),
        # A batch script is not part of a step.
        ({k: v for k, v in SLURM.items() if "STEP" not in k}, None),
        (OPEN_MPI, ("Open MPI", "10.0.0.1:61442", 4, 3, (1,))),
        (
            OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
            ("Open MPI", "10.0.0.1:61442", 4, 3, None),
        ),
        # An address that the user sets is combined with what is detected.
        (
            SLURM | {"JAX_COORDINATOR_ADDRESS": "ib07:99"},
            ("Slurm", "ib07:99", 7, 4, (0,)),
        ),
        # Slurm has started the processes of Open MPI.
        (
            OPEN_MPI | {"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_PROCID": "0"},
            ("Open MPI", "10.0.0.1:61442", 4, 3, (1,)),
        ),
        # One launcher has started another.
        (SLURM | OWN | {"PIPEJAX_LAUNCHED": "1"}, (*OWN_PLACE, None)),
        (SLURM | TORCHRUN | {"TORCHELASTIC_RUN_ID": "1"}, (*TORCHRUN_PLACE, (1,))),
        ({}, None),
    ],
)
def test_launcher_is_detected_by_its_variables(environ, variables, place):
    environ(variables)
    assert launch.detect() == (place and launch.Place(*place))


@pytest.mark.parametrize(
    ("name", "local", "variables", "launcher", "devices"),
    [
        (
            "K8sCluster",
            None,
            {"KUBERNETES_SERVICE_HOST": "10.0.0.2"},
            "Kubernetes",
            None,
        ),
        ("GkeTpuCluster", None, {}, "TPU", None),
        ("Mpi4pyCluster", 1, {"PMI_SIZE": "4", "PMI_RANK": "3"}, "MPI", (1,)),
    ],
)
def test_cluster_found_by_jax_is_taken_over(
    environ, monkeypatch, name, local, variables, launcher, devices
):
    """Replaces the answers of clusters that are absent."""
    (cluster,) = (c for c in ClusterEnv._cluster_types if c.__name__ == name)
    answers = {
        "is_env_present": True,
        "get_coordinator_address": "10.0.0.1:1234",
        "get_process_count": 4,
        "get_process_id": 3,
        "get_local_process_id": local,
    }
    for method, answer in answers.items():
        monkeypatch.setattr(cluster, method, lambda answer=answer, **_: answer)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: True)
    environ(variables)
    assert launch.detect() == launch.Place(launcher, "10.0.0.1:1234", 4, 3, devices)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {k: v for k, v in OWN.items() if k != "JAX_PROCESS_ID"},
            "JAX_PROCESS_ID must be set where JAX_COORDINATOR_ADDRESS, JAX_NUM",
        ),
        (
            {k: v for k, v in TORCHRUN.items() if k != "MASTER_ADDR"},
            "MASTER_ADDR must be set where MASTER_PORT",
        ),
        (TORCHRUN | {"RANK": "one"}, "RANK must be a whole number .* got 'one'"),
        (TORCHRUN | {"RANK": "4"}, r"`rank` must lie in \[0, 4\)"),
        (
            SLURM | {"SLURM_NODEID": "x"},
            "SLURM_NODEID must be a whole number .* got 'x'",
        ),
        (OWN | {"JAX_COORDINATOR_ADDRESS": "host"}, "`coordinator` must be host:port"),
        (
            SLURM | TORCHRUN,
            "process 3 of 4, which contradicts SLURM_NTASKS=7, SLURM_PROCID=4",
        ),
        (
            OWN | {"WORLD_SIZE": "8"},
            "process 3 of 4, which contradicts WORLD_SIZE=8. Unset",
        ),
        (
            OWN | {"PMI_SIZE": "4", "PMI_RANK": "2"},
            "process 3 of 4, which contradicts PMI_RANK=2. Unset",
        ),
        # Without an error, each process would train alone.
        (
            {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:1234"},
            "JAX_NUM_PROCESSES, JAX_PROCESS_ID must be set where JAX_COORDINATOR",
        ),
        (
            {k: v for k, v in TORCHRUN.items() if k != "RANK"},
            "RANK must be set where MASTER_ADDR, MASTER_PORT, WORLD_SIZE are",
        ),
        (
            SLURM | {"SLURM_NTASKS": "x"},
            "cannot read the variables of Slurm: .*'x'",
        ),
        (
            {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"},
            "mpi4py",
        ),
    ],
)
def test_missing_or_contradicting_variables_are_refused(environ, variables, message):
    environ(variables)
    with pytest.raises((ValueError, RuntimeError), match=message):
        launch.detect()


def test_bad_launcher_variable_is_one_line_on_the_command_line(environ, capsys):
    environ(TORCHRUN | {"RANK": "4"})
    assert main(["calibrate"]) == 2
    assert capsys.readouterr().err.startswith("pipejax: `rank` must lie in [0, 4)")


def test_timeout_below_a_second_is_passed_on_as_one_second(environ, monkeypatch):
    """JAX takes whole seconds, and a timeout of 0 means none."""
    asked = []

    def detect(*args):
        asked.append(args[-1])
        return "10.0.0.1:1234", 7, 4, None

    name = "auto_detect_unset_distributed_params"
    monkeypatch.setattr(ClusterEnv, name, detect)
    environ(SLURM)
    launch.detect(timeout=0.5)
    assert asked == [1]
