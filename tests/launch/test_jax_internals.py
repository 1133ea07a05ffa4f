"""Tests that JAX still has the internals of which pipejax makes use."""

from pipejax.launch import _jax_internals

from .helpers import SLURM


def test_detected_cluster_is_not_joined(environ):
    environ(SLURM)
    found = _jax_internals.detect_cluster(None, None, 1.0)
    address, processes, rank, devices = found
    assert address.startswith("gpu07:")
    assert (processes, rank, [*devices]) == (7, 4, [0])
    assert _jax_internals.key_value_client() is None
