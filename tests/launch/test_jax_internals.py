"""Tests that JAX still has the internal function that finds a cluster."""

from pipejax.launch import _jax_internals

from .helpers import SLURM


def test_detected_cluster_is_not_joined(environ):
    environ(SLURM)
    found = _jax_internals.detect_cluster(None, None, 1.0)
    address, processes, rank, devices = found
    assert address.startswith("gpu07:")
    assert (processes, rank, [*devices]) == (7, 4, [0])
