import jax
import jax.numpy as jnp
import pytest

import pipejax as pj
from pipejax.overlap import _topology


def needs(*modules):
    missing = [name for name in modules if not _topology._exists(name)]
    return pytest.mark.skipif(bool(missing), reason=f"{missing} not installed")


GPU = needs("jax_plugins.xla_cuda12", "nvidia.cuda_nvcc")
TPU = needs("libtpu")


@pytest.mark.parametrize(
    ("target", "count", "kind"),
    [
        pytest.param("a100:1x1x8", 8, "NVIDIA A100-SXM4-80GB", marks=GPU),
        pytest.param("h100:1x8x8", 64, "NVIDIA H100 80GB HBM3", marks=GPU),
        pytest.param("h200:2x2x8", 32, "NVIDIA H200 141GB HBM3e", marks=GPU),
        pytest.param("b200:1x32x8", 256, "NVIDIA B200", marks=GPU),
        pytest.param("tpu:v5e:2x4", 8, "TPU v5 lite", marks=TPU),
        pytest.param("v5p:2x2x2", 8, "TPU v5", marks=TPU),
        pytest.param("tpu:v6e:4x4", 16, "TPU v6 lite", marks=TPU),
        pytest.param("tpu:tpu7x:2x2x1", 8, "TPU7x", marks=TPU),
    ],
)
def test_absent_devices_can_be_compiled_for(target, count, kind):
    """A sum over all devices compiles to one all-reduce, although they are absent."""
    devices = pj.overlap.topology(target)
    assert len(devices) == count
    assert {device.device_kind for device in devices} == {kind}
    mesh = pj.data_mesh(devices=devices)

    def local(x):
        return jax.lax.psum(x @ x, "data")

    data = jax.sharding.PartitionSpec("data")
    program = jax.shard_map(
        local, mesh=mesh, in_specs=data, out_specs=jax.sharding.PartitionSpec()
    )
    shape = jax.ShapeDtypeStruct((256 * count, 256), jnp.float32)
    report = pj.overlap.inspect(jax.jit(program), shape)
    assert [c.kind for c in report.collectives] == ["all-reduce"]
    assert report.collectives[0].group_size == count
    assert {device.platform for device in jax.devices()} == {"cpu"}


@TPU
def test_slices_of_a_tpu_are_listed_in_order():
    devices = pj.overlap.topology("tpu:3xv5e:2x2")
    assert [device.slice_index for device in devices] == [0] * 4 + [1] * 4 + [2] * 4


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("x100:1x1x8", "there is no such kind"),
        ("h100", "there is no such kind"),
        ("", "there is no such kind"),
        ("tpu:h100:1x1x8", "there is no such kind"),
        ("h100:8", "a GPU's shape is slices x hosts x GPUs per host"),
        ("h100:1x0x8", "a GPU's shape is slices x hosts x GPUs per host"),
        ("2xh100:1x1x8", "the first number of a GPU's shape is the slices"),
        ("tpu:0xv5e:2x2", "there is no such kind"),
        pytest.param("tpu:v5e:3x3", "INVALID_ARGUMENT", marks=TPU),
    ],
)
def test_unknown_targets_are_refused(target, why):
    kinds = "a100, h100, h200, b200 .* v5e, v5p, v6e, tpu7x"
    with pytest.raises(ValueError, match=rf"`target` must be .*{kinds}.*{why}"):
        pj.overlap.topology(target)


@pytest.mark.parametrize(
    ("target", "missing"),
    [
        ("h100:1x1x8", "jax_plugins.xla_cuda12 and nvidia.cuda_nvcc"),
        ("tpu:v5e:2x4", "libtpu"),
    ],
)
def test_missing_wheels_are_named(target, missing, monkeypatch):
    monkeypatch.setattr(_topology, "_exists", lambda module: False)
    install = r"pip install 'pipejax\[aot\]'"
    with pytest.raises(ImportError, match=rf"{missing} must be installed .* {install}"):
        pj.overlap.topology(target)


@pytest.mark.parametrize(
    "target", ["h100:1x9999999999x8", "h100:1x1x100001", "tpu:99999xv5e:2x2"]
)
def test_too_many_devices_are_refused(target):
    with pytest.raises(ValueError, match="there may be at most 100,000 devices"):
        pj.overlap.topology(target)
