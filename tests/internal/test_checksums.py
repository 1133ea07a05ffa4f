"""Tests that checksums follow their equations, on any layout and for any dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax._internal.checksums import checksums


def by_hand(array):
    """Returns the checksum of a NumPy array, in Python's integers."""
    words = np.ascontiguousarray(array).reshape(-1)
    size = min(words.itemsize, 4)
    s1 = s2 = 0
    for i, word in enumerate(words.view(f"uint{8 * size}").tolist()):
        x = (word + 0x9E3779B9 * i) % 2**32
        x ^= x >> 16
        x = x * 0x85EBCA6B % 2**32
        x ^= x >> 13
        x = x * 0xC2B2AE35 % 2**32
        x ^= x >> 16
        s1 += x
        s2 += (2 * i + 1) * x
    return f"{s1 % 2**32:08x}{s2 % 2**32:08x}"


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "int8", "uint32", "bool", "float16", "complex64"]
)
def test_checksum_equals_its_twin(dtype):
    values = np.random.default_rng(0).normal(size=(3, 5, 4)) * 100
    array = jnp.asarray(values.astype(np.float32)).astype(dtype)
    assert checksums({"x": array}) == {"x": by_hand(np.asarray(array))}


def test_checksum_of_64_bit_arrays_equals_its_twin():
    with jax.enable_x64(True):
        array = jnp.asarray(np.random.default_rng(0).normal(size=(3, 7)))
        assert array.dtype == "float64"
        assert checksums({"x": array}) == {"x": by_hand(np.asarray(array))}


@pytest.mark.parametrize("spec", [P(), P("data"), P(None, "data"), P(None, None)])
@pytest.mark.parametrize("devices", [1, 4])
def test_checksum_does_not_depend_on_the_layout(devices, spec):
    values = np.random.default_rng(0).normal(size=(8, 12)).astype(np.float32)
    array = jax.device_put(values, NamedSharding(pj.data_mesh(devices), spec))
    assert checksums({"x": array}) == {"x": by_hand(values)}


def test_checksum_does_not_depend_on_the_axes():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("host", "device"))
    values = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    for spec in (P("host", "device"), P("device"), P(("host", "device"))):
        array = jax.device_put(values, NamedSharding(mesh, spec))
        assert checksums({"x": array}) == {"x": by_hand(values)}


@pytest.mark.parametrize("odd", range(8))
def test_other_bits_in_any_copy_are_noticed(odd):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("host", "device"))
    values = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    placed = jax.device_put(values, NamedSharding(mesh, P("device")))
    assert checksums({"x": placed}, every_copy=True) == {"x": by_hand(values)}
    pieces = [
        jax.device_put(x.data + (i == odd), x.device)
        for i, x in enumerate(placed.addressable_shards)
    ]
    array = jax.make_array_from_single_device_arrays(
        values.shape, placed.sharding, pieces
    )
    assert checksums({"x": array}, every_copy=True) != {"x": by_hand(values)}


def test_checksum_depends_on_every_bit():
    """Any single flip changes the first sum, because the mixing is bijective."""
    values = np.zeros((4, 5), np.uint32)
    found = {checksums({"x": jnp.asarray(values)})["x"][:8]}
    for place in np.ndindex(*values.shape):
        for bit in range(0, 32, 5):
            flipped = values.copy()
            flipped[place] ^= np.uint32(1 << bit)
            found.add(checksums({"x": jnp.asarray(flipped)})["x"][:8])
    assert len(found) == 1 + 20 * 7


def test_checksum_notices_moved_values():
    values = np.arange(24, dtype=np.float32).reshape(4, 6)
    others = [values[::-1], values.T.reshape(4, 6), np.roll(values, 1), -values]
    sums = [checksums({"x": jnp.asarray(x)})["x"] for x in (values, *others)]
    assert len(set(sums)) == len(sums)
    # Zeros that change places remain the same array.
    assert checksums({"x": jnp.zeros(3)}) == checksums({"x": jnp.zeros(3)})


def test_checksums_keep_names_and_accept_scalars():
    found = checksums({"b": jnp.float32(2), "a": jnp.float32(2)})
    assert list(found) == ["b", "a"]
    assert found["a"] == found["b"] == by_hand(np.float32([2]))
    assert checksums({}) == {}
