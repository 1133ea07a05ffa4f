"""Tests what `pipejax profile-allreduce` measures, draws and refuses."""

import json

import pytest

import pipejax as pj
from pipejax import timing
from pipejax.cli import _profile, main
from pipejax.cli._cluster import Measured
from pipejax.cli._usage import UsageError
from pipejax.overlap import topology

SMALL = ("--elements", "1000", "--rounds", "1")


def test_profile_on_one_machine_is_printed_and_written(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    out = tmp_path / "profile.json"
    flags = ("--algorithms", "psum", "two_shot", "--bandwidth", "8mbit")
    assert main(["profile-allreduce", *SMALL, *flags, "--out", str(out)]) == 0
    # psum cannot add int8's payloads, so there is no row for the two.
    rows = json.loads(out.read_text())
    assert list(rows) == ["psum, none", "two_shot, none", "two_shot, int8"]
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["ms", *rows["psum, none"], "total", "wire"]
    # The wire takes 2 (8 - 1)/8 of 4,000 bytes at 1 MB/s.
    assert lines[0].split()[-1] == "7.00"


def test_power_sgd_is_profiled_with_matrices_and_feedback(
    tmp_path, capsys, monkeypatch
):
    """PowerSGD gets matrices, which it can compress, and error feedback."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    out = tmp_path / "profile.json"
    flags = ("--codecs", "power_sgd", "--algorithms", "psum", "two_shot")
    size = ("--elements", "65536", "--rounds", "1", "--bandwidth", "8mbit")
    assert main(["profile-allreduce", *size, *flags, "--out", str(out)]) == 0
    # A two-shot exchange would cut the matrices, so it has no row.
    assert list(json.loads(out.read_text())) == ["psum, power_sgd"]
    # Rank 4 of a 64 x 1,024 matrix sends 2 (8 - 1)/8 of 4 * 4 * 1,088 bytes at 1 MB/s.
    assert capsys.readouterr().out.split()[-1] == "30.46"


def test_plot_flag_writes_a_picture(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    plot = tmp_path / "profile.png"
    flags = ("--algorithms", "psum", "--plot", str(plot))
    assert main(["profile-allreduce", *SMALL, *flags]) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--rounds", "0"], "pipejax: `--rounds` must be at least 1, got 0"),
        (
            ["--bandwidth", "8e6"],
            "pipejax: `--bandwidth` must be a number above 0 with",
        ),
        (["--elements", "1.5"], "pipejax: `--elements` must be a whole number above"),
        (["--codecs", "int9"], "pipejax: `--codecs` must be names out of bf16, "),
        (
            ["--codecs", "power_sgd", "--algorithms", "ring"],
            "pipejax: `--algorithms` must have one that takes one of `--codecs`, got"
            " ring and power_sgd",
        ),
    ],
)
def test_bad_flags_of_profile_are_refused(capsys, flags, says):
    assert main(["profile-allreduce", *flags]) == 2
    assert capsys.readouterr().err.startswith(says)


def test_wire_of_a_host_carries_the_bytes_of_all_its_devices(monkeypatch):
    """A device of eight sends 4 of its 7 pieces to the other host, and so do four."""
    mesh = pj.data_mesh(8)
    two = pj.data_mesh(8, axis_name=("host", "device"), hosts=2)
    monkeypatch.setattr(_profile, "measured", lambda _: Measured(two, []))
    cluster = _profile._cluster_of(mesh, 8e6)
    assert (cluster.hosts, cluster.devices, cluster.link.bandwidth) == (2, 4, 1e6)
    wire = timing.flat(cluster, "two_shot", 1000).between.wire
    assert wire == pytest.approx(4 * 4 / 7 * 7000)


def test_devices_on_unknown_hosts_have_no_wire(monkeypatch):
    mesh = pj.data_mesh(devices=topology("h100:1x1x8"))
    monkeypatch.setattr(_profile, "measured", lambda _: Measured(mesh, ["share"]))
    with pytest.raises(UsageError, match="`--bandwidth` must be left out"):
        _profile._cluster_of(mesh, 8e6)
