"""Tests `pipejax doctor` on one device, on several, and on hosts of a cluster."""

import dataclasses
import json
import sys

import jax.numpy as jnp
import optax
import pytest

import pipejax as pj
from pipejax import timing
from pipejax.cli import _doctor, main
from pipejax.cli._model import Model, RunnableStep

from ..experiments.test_cluster import needs_namespaces, run
from .test_calibrate import MODEL

PNG = b"\x89PNG"


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(timing, "SIZES", (20, 4000))


def doctor(tmp_path, *flags):
    """Returns the exit status, the findings and the picture of `pipejax doctor`."""
    pytest.importorskip("matplotlib")
    out, plot = tmp_path / "found.json", tmp_path / "found.png"
    files = ["--json", str(out), "--plot", str(plot)]
    code = main(["doctor", "--rounds", "2", "--codecs", *files, *flags])
    return code, json.loads(out.read_text()), plot.read_bytes()


def test_doctor_measures_the_model_of_a_user(tmp_path, capsys):
    path = tmp_path / "examined_model.py"
    path.write_text(MODEL)
    code, found, picture = doctor(tmp_path, "--model", f"{path}:step")
    assert code == 0
    assert found["here"]["devices"] == "8 x cpu (cpu)"
    assert found["model"]["elements"] == 48
    assert found["model"]["batch"] == 8
    assert timing.from_json(found["cluster"]).hosts == 8
    assert len(found["overlap"]["step"]) == 2
    printed = capsys.readouterr().out
    assert "48 parameters" in printed
    assert found["python"] in printed
    assert picture.startswith(PNG)


SHORT = 3e-5  # milliseconds of compute


@pytest.fixture
def slow_links(monkeypatch):
    """Lets links between hosts have a latency of one second."""
    calibrate = timing.calibrate

    def slower(*args):
        fit = calibrate(*args)
        link = dataclasses.replace(fit.cluster.link, latency=1.0)
        return fit._replace(cluster=dataclasses.replace(fit.cluster, link=link))

    monkeypatch.setattr(timing, "calibrate", slower)


@pytest.mark.usefixtures("slow_links")
def test_doctor_plans_for_hosts_with_several_devices(tmp_path, capsys, monkeypatch):
    path = tmp_path / "two_levels.py"
    path.write_text(MODEL)
    monkeypatch.setattr(Model, "of", lambda *_: Model(48, SHORT))
    code, found, _ = doctor(tmp_path, "--model", f"{path}:step", "--hosts", "4")
    assert code == 0
    cluster = timing.from_json(found["cluster"])
    assert (cluster.hosts, cluster.devices) == (4, 2)
    printed = capsys.readouterr().out
    assert "inside a host, between 2 devices: " in printed
    mesh = 'mesh = pj.data_mesh(axis_name=("host", "device"), hosts=4)\n'
    assert mesh in printed.split("pj.make_train_step")[1]  # that of local steps
    assert "each was measured as a host" not in printed


@pytest.mark.usefixtures("slow_links")
def test_doctor_prints_a_local_step_for_a_short_compute(tmp_path, capsys, monkeypatch):
    path = tmp_path / "short_model.py"
    path.write_text(MODEL)
    monkeypatch.setattr(Model, "of", lambda *_: Model(48, SHORT))
    code, found, _ = doctor(tmp_path, "--model", f"{path}:step")
    assert code == 0
    best = found["local_steps"][0]
    # Nothing hides the latency of an exchange, so it is at once.
    assert (best["overlap_steps"], best["sync_every"] > 1) == (0, True)
    printed = capsys.readouterr().out
    assert f"    sync_every={best['sync_every']}," in printed
    assert "train = pj.make_local_step(" in printed


def test_doctor_sends_a_sharded_optimizer_to_plan(tmp_path, capsys):
    path = tmp_path / "sharded_model.py"
    path.write_text(MODEL.replace("mesh=mesh", "mesh=mesh, shard_optimizer=True"))
    code, found, _ = doctor(tmp_path, "--model", f"{path}:step")
    assert code == 0
    assert found["ways"] is found["python"] is None
    assert found["cluster"]
    printed = capsys.readouterr().out
    assert (
        "pipejax plan --hosts N --devices N --bandwidth RATE --parameters 48 --c"
        in printed
    )
    assert " --batch 8 --shard-optimizer --one-core\n" in printed
    assert "8 devices share 1 host(s), and each was measured as a host" in printed


@pytest.mark.full  # it measures a larger model than its own
def test_doctor_accepts_a_model_in_numbers(tmp_path, capsys):
    code, found, _ = doctor(tmp_path, "--parameters", "300M", "--compute-ms", "250")
    assert code == 0
    given = {"elements": 300_000_000, "compute": 250.0, "batch": None}
    assert given.items() <= found["model"].items()
    assert found["overlap"]["of"] == "a built-in MLP"
    assert (
        "300,000,000 parameters, 250.0 ms of compute a step" in capsys.readouterr().out
    )


@pytest.mark.full
def test_doctor_on_one_device_reports_no_exchange(tmp_path, capsys, monkeypatch):
    mesh = pj.data_mesh(1)
    monkeypatch.setattr(pj, "data_mesh", lambda: mesh)
    code, found, picture = doctor(tmp_path)
    assert code == 0
    assert found["cluster"] is found["ways"] is None
    assert "A single device has nothing to exchange." in capsys.readouterr().out
    assert picture.startswith(PNG)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--rounds", "1"], "`--rounds` must be at least 2, got 1"),
        (["--parameters", "3M"], "`--parameters` and `--compute-ms` must be given to"),
        (
            ["--parameters", "3M", "--compute-ms", "1", "--model", "a:b"],
            "without `--model`; got 3M, 1.0 and a:b",
        ),
        (
            ["--parameters", "3M", "--compute-ms", "nan"],
            "`--compute-ms` must be at least 1e-06, got nan",
        ),
        (["--codecs", "zip"], "zip"),
        (["--hosts", "3"], "`--hosts` must divide the 8 devices into equal parts, go"),
    ],
)
def test_bad_flags_of_doctor_are_refused(flags, says, capsys):
    assert main(["doctor", *flags]) == 2
    assert says in capsys.readouterr().err


def test_hosts_of_a_single_device_are_checked_too(monkeypatch, capsys):
    one = pj.data_mesh(1)
    monkeypatch.setattr(pj, "data_mesh", lambda *_, **__: one)
    assert main(["doctor", "--hosts", "0"]) == 2
    assert "`--hosts` must divide the 1 devices" in capsys.readouterr().err


@pytest.mark.full
@needs_namespaces
def test_doctor_on_a_cluster_reports_from_one_host(tmp_path):
    out = tmp_path / "found.json"
    command = [sys.executable, "-m", "pipejax.cli", "doctor", "--json", str(out)]
    code, hosts, said = run(
        *("--hosts", "2", "--rate", "100mbit"),
        command=[*command, "--codecs", "int8"],
    )
    assert code == 0, (said, hosts)
    found = json.loads(out.read_text())
    assert found["here"]["processes"].startswith("2, started by")
    assert found["overlap"]["executor"].startswith("host")
    assert any("Your model" in line for line in hosts["host0"])
    assert not any("Your model" in line for line in hosts["host1"])


@pytest.mark.parametrize(
    ("width", "executor", "elements", "wanted"),
    [
        (2, "fused", 128, [True, False]),
        (1, "fused", 128, None),
        (2, "host", 128, None),
        (2, "fused", 300, None),  # the size of another model
    ],
)
def test_least_delay_is_known_for_a_pipelined_model(width, executor, elements, wanted):
    def loss_fn(params, batch):
        for w in params:
            batch = jnp.tanh(batch @ w)
        return jnp.mean(batch**2)

    train = pj.make_train_step(
        loss_fn, optax.sgd(0.1), mesh=pj.data_mesh(2), executor=executor
    )
    state = train.init([jnp.ones((8, 8)), jnp.ones((8, 8))])
    program = RunnableStep(train, state, jnp.ones((4, 8)))
    exchange = timing.Duration(0, 0.3, 0, 0, 0)
    config = timing.TrainConfig(width, "psum")
    way = timing.RankedConfig(config, exchange, 1.0, 1.0, 1.9, 1.3)
    model = Model(elements, 1000.0)  # a second of compute
    assert _doctor._least_delay(program, model, way) == wanted


def test_least_delay_of_a_local_step_is_not_looked_for():
    train = pj.make_local_step(
        lambda w, x: jnp.mean((x @ w) ** 2),
        optax.sgd(0.1),
        mesh=pj.data_mesh(2),
        sync_every=2,
    )
    program = RunnableStep(train, train.init(jnp.ones((8, 8))), jnp.ones((4, 8)))
    way = timing.RankedConfig(
        timing.TrainConfig(2, "psum"), timing.Duration(0, 0.3, 0, 0, 0), 1, 1, 1.9, 1.3
    )
    assert _doctor._least_delay(program, Model(64, 1000.0), way) is None
