"""Tests the experiments on sharded transformers with tiny ones."""

import json
import math
import string

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import pipejax as pj
from experiments.sharded import cluster, compiled, model, nanogpt

from .here import limit_devices

TINY = model.Config(layers=3, features=16, heads=2, vocabulary=65, context=8)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(model.SIZES, "tiny", TINY)
    monkeypatch.setattr(nanogpt, "CONFIG", TINY)


def tokens(count=4, length=9, seed=1):
    rng = np.random.default_rng(seed)
    return rng.integers(TINY.vocabulary, size=(count, length)).astype(np.int32)


def test_transformer_is_causal_and_starts_without_preference():
    graph, params = model.init(TINY)
    loss = jax.jit(model.loss_fn(graph))(params, tokens())
    assert loss == pytest.approx(math.log(65), abs=0.1)
    given = tokens()[:, :-1]
    changed = given.copy()
    changed[:, 5] += 1
    run = jax.jit(lambda params, tokens: nnx.merge(graph, params)(tokens))
    before, after = run(params, given), run(params, changed % 65)
    np.testing.assert_allclose(before[:, :5], after[:, :5], atol=1e-6)
    assert not np.allclose(before[:, 5:], after[:, 5:], atol=1e-4)


@pytest.mark.parametrize(
    ("name", "millions"),
    [("nano", 0.8), ("10M", 10.8), ("124M", 124), ("1B", 1019), ("7B", 6657)],
)
def test_model_sizes_have_the_named_number_of_parameters(name, millions):
    _, params = nnx.eval_shape(lambda: model.init(model.SIZES[name]))
    elements = sum(x.size for x in jax.tree.leaves(params))
    assert elements / 1e6 == pytest.approx(millions, rel=0.03)


@pytest.mark.full  # in the quick run, tests/train_step/test_sharded.py has a small one
@pytest.mark.parametrize("inner", [("fsdp",), ("fsdp", "tp")])
def test_groups_train_the_model_like_single_devices(inner):
    auto = (jax.sharding.AxisType.Auto,) * (1 + len(inner))
    sizes = (2, *(2 for _ in inner))
    devices = jax.devices()[: np.prod(sizes)]
    mesh = jax.make_mesh(sizes, ("host", *inner), axis_types=auto, devices=devices)
    graph, params = model.init(TINY)
    loss_fn, tx = model.loss_fn(graph), optax.adamw(1e-2)

    def trained(train, params, axis_name):
        state = train.init(params)
        for seed in range(4):
            batch = train.batch(tokens(8, seed=seed), axis_name=axis_name)
            state, _ = train.step(state, batch)
        return train.drain(state)[0].params

    one = pj.make_train_step(loss_fn, tx, mesh=pj.data_mesh(2))
    many = pj.make_train_step(loss_fn, tx, mesh=mesh, axis_name="host")
    places = model.shardings(params, mesh)
    placed = jax.tree.map(jax.device_put, params, places)
    wanted = trained(one, params, None)
    found = trained(many, placed, ("host", "fsdp"))
    assert found["layers"]["up"][...].sharding.spec[1] == "fsdp"
    for leaf, other in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=0, atol=2e-4)


def test_axes_with_indivisible_sizes_are_not_split():
    mesh = pj.data_mesh(8, axis_name=("host", "fsdp"), hosts=1)
    odd = model.Config(layers=1, features=12, heads=2, context=8)
    _, params = nnx.eval_shape(lambda: model.init(odd))
    specs = {x.spec for x in jax.tree.leaves(model.shardings(params, mesh))}
    assert not any("fsdp" in spec for spec in specs if spec != P(None, "fsdp", None))


@pytest.mark.full
def test_nanogpt_keeps_finished_runs(tiny, tmp_path, monkeypatch, capsys):
    text = tmp_path / "input.txt"
    alphabet = string.ascii_letters + string.digits + " .\n"
    text.write_text(alphabet * 40)
    limit_devices(monkeypatch)
    runs = [nanogpt.Contender("adamw", 1, 1, 1), nanogpt.Contender("muon", 2, 2, 2)]
    monkeypatch.setattr(nanogpt, "RUNS", runs)
    config = nanogpt.Config(text, seeds=(0,), steps=4, out=tmp_path / "out.json")
    cells = nanogpt.main(config)
    assert [nanogpt.losses(cells, each) for each in runs] == [
        {0: cell["loss"]} for cell in cells
    ]
    assert all(3 < c["loss"] < 5 for c in cells)
    assert json.loads(config.out.read_text())["documented"] == 1.88
    capsys.readouterr()
    assert nanogpt.main(config) == cells
    assert "seed 0" not in capsys.readouterr().out


def test_rows_are_paired_by_seed():
    losses = {("adamw", 1, 4, 1): (1.0, 2.0), ("adamw", 2, 4, 1): (1.1, 2.3)}
    cells = [
        nanogpt.Contender(*contender)._asdict() | {"seed": seed, "loss": loss}
        for contender, found in losses.items()
        for seed, loss in enumerate(found)
    ]
    _, one, two = nanogpt.rows(cells)
    assert one == ["adamw", "1", "4", "1", "2", "1.5000 ± 0.5000", ""]
    assert two == ["adamw", "2", "4", "1", "2", "1.7000 ± 0.6000", "+0.2000"]


@pytest.mark.full
def test_steps_compiled_for_two_hosts_are_checked(tiny, tmp_path, monkeypatch):
    pytest.importorskip("jax_plugins.xla_cuda12")
    pytest.importorskip("nvidia.cuda_nvcc")
    limit_devices(monkeypatch)
    steps = ("D-Sync", "K=2, plain")
    out = tmp_path / "out.json"
    compiled.main(compiled.Config(("tiny",), ("h100:1x2x2",), steps, out=out))
    first, second = json.loads(out.read_text())["cells"]
    assert first["covered_between"] == 0
    assert second["checks"]["between"]
    assert second["elements"] == first["elements"]
    assert len(compiled.rows([first, second])) == 3


def test_cells_are_sorted_by_size_device_and_step():
    steps, targets = list(compiled.STEPS), list(compiled.TARGETS)
    names = [("7B", targets[0], steps[0]), ("1B", targets[1], steps[0])]
    names += [("1B", targets[0], steps[1]), ("1B", "others", steps[0])]
    cells = [dict(zip(("size", "target", "step"), x, strict=True)) for x in names]
    found = sorted(cells, key=compiled.place)
    assert [cells.index(cell) for cell in found] == [2, 1, 3, 0]


def test_refusal_by_the_compiler_is_shown_in_the_row():
    cell = compiled.failed("7B", "tpu:2xv5e:4x4", "K=2", "no memory")
    assert compiled.rows([cell])[1][:4] == ["7B", "tpu:2xv5e:4x4", "K=2", "refused"]


def test_rows_of_the_cluster_show_times_and_ratios():
    seconds = {"compute": 0.2, "D-Sync": 0.5, "Pipe-SGD": 0.33, "exchange": 0.3}
    methods = {
        k: {"seconds": [x], "cores": [0.3], "wire_bytes": 12_500_000}
        for k, x in seconds.items()
    }
    rows = cluster.rows([{"hosts": 2, "methods": methods}], "500mbit")
    assert rows[3] == ["2", "Pipe-SGD", "330", "1.65", "1.10", "200", "300"]


def test_host_batch_has_tokens_of_its_shape():
    found = cluster.tokens(cluster.Config(size="10M"), 1)
    assert found.shape == (4, 65)
    assert jnp.issubdtype(found.dtype, jnp.int32)
