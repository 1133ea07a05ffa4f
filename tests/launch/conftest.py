"""Provides fixtures for the tests of places and jobs."""

import pytest

from .helpers import OPEN_MPI, OWN, SLURM, TORCHRUN, free_port


@pytest.fixture
def port():
    return free_port()


@pytest.fixture
def environ(monkeypatch):
    """Returns a function that sets variables, without those of any other launcher."""
    known = [*OWN, *TORCHRUN, *SLURM, *OPEN_MPI, "PMI_SIZE", "PMIX_RANK"]
    known += ["CUDA_VISIBLE_DEVICES", "JAX_LOCAL_DEVICE_IDS", "TORCHELASTIC_RUN_ID"]
    known += ["TORCHELASTIC_USE_AGENT_STORE"]
    known += ["SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "KUBERNETES_SERVICE_HOST"]
    known += ["PMI_RANK", "PMIX_SIZE"]
    for name in known:
        monkeypatch.delenv(name, raising=False)

    def set_all(variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_all
