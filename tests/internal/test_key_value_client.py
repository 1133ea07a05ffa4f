"""Tests that JAX still has the internals of which pipejax makes use."""

from pipejax._internal.key_value_client import coordinator, key_value_client


def test_process_alone_has_no_store():
    assert key_value_client() is None
    assert coordinator() is None
