"""Tests that options are tried on the compiler, and dropped if it refuses them."""

import logging

import jax
import optax
import pytest

import pipejax as pj
from pipejax._core.executors._options import (
    GPU,
    GPU_MIXED,
    TPU_SPARSE_CORE,
    TPU_V5E,
    probe,
)

from ...helpers import batches, init_params, loss_fn
from ...overlap.test_topology import GPU as NEEDS_GPU
from ...overlap.test_topology import TPU as NEEDS_TPU


def test_cpu_has_no_compiler_options():
    train = pj.make_train_step(loss_fn, optax.sgd(0.1), mesh=pj.data_mesh(2))
    assert train.compiler_options == {}


def test_refused_option_is_dropped_and_reported(caplog):
    caplog.set_level(logging.WARNING, logger="pipejax")
    wanted = {"xla_cpu_enable_fast_math": False, "xla_no_such_option": True}
    options = probe(pj.data_mesh(1), wanted)
    assert options.kept == {"xla_cpu_enable_fast_math": False}
    assert "xla_no_such_option" in options.dropped["xla_no_such_option"]
    assert "compiler option xla_no_such_option left out" in caplog.text


def test_option_refused_beside_another_is_dropped(monkeypatch):
    def refusal(mesh, options):
        return "not both" if len(options) > 1 else None

    monkeypatch.setattr("pipejax._core.executors._options._refusal", refusal)
    options = probe(pj.data_mesh(1), {"one": 1, "other": 2})
    assert options == ({"one": 1}, {"other": "not both"})


def test_accepted_options_are_all_kept():
    wanted = {"xla_cpu_enable_fast_math": False}
    assert probe(pj.data_mesh(1), wanted) == (wanted, {})


@pytest.mark.parametrize(
    ("target", "width", "expected"),
    [
        pytest.param("h100:1x1x8", 2, GPU, marks=NEEDS_GPU),
        pytest.param("h100:1x1x8", 1, GPU, marks=NEEDS_GPU),
        pytest.param("b200:1x1x8", 3, GPU, marks=NEEDS_GPU),
        pytest.param("tpu:v5e:2x4", 1, TPU_V5E, marks=NEEDS_TPU),
        pytest.param("tpu:v5p:2x2x2", 2, TPU_SPARSE_CORE, marks=NEEDS_TPU),
        pytest.param("tpu:v6e:2x4", 2, TPU_SPARSE_CORE, marks=NEEDS_TPU),
        pytest.param("tpu:tpu7x:2x2x1", 2, {}, marks=NEEDS_TPU),
    ],
)
def test_options_depend_on_backend_and_generation(target, width, expected):
    mesh = pj.data_mesh(devices=pj.overlap.topology(target))
    train = pj.make_train_step(loss_fn, optax.sgd(0.1), mesh=mesh, width=width)
    kept, dropped = train.executor.options
    assert train.compiler_options == kept == {k: expected[k] for k in kept}
    assert kept.keys() | dropped.keys() == expected.keys()
    # JAX 0.10 has neither this option nor the kernels that it turns off.
    assert dropped.keys() <= {"xla_gpu_experimental_use_collective_kernels"}
    assert train.executor.name == "fused"
    assert pj.compiler_options(mesh) == kept


@NEEDS_GPU
def test_groups_and_local_steps_estimate_how_long_collectives_take():
    topology = pj.overlap.topology("h100:1x2x4")
    mesh = pj.data_mesh(devices=topology, axis_name=("host", "device"))
    grouped = pj.make_train_step(loss_fn, optax.sgd(0.1), mesh=mesh, axis_name="host")
    mesh = pj.data_mesh(devices=topology)
    rounds = pj.make_local_step(loss_fn, optax.sgd(0.1), mesh=mesh)
    for train in (grouped, rounds):
        kept, dropped = train.executor.options
        assert kept.keys() | dropped.keys() == GPU_MIXED.keys()
        assert kept["xla_gpu_enable_analytical_latency_estimator"]


@NEEDS_GPU
def test_synchronous_step_sends_its_first_gradients_early():
    """XLA alone would merge all gradients here, 29 MB, into one all-reduce."""
    mesh = pj.data_mesh(devices=pj.overlap.topology("h100:1x8x8"))
    train = pj.make_train_step(wide_loss, optax.sgd(0.1), mesh=mesh, width=1)
    params = {name: jax.ShapeDtypeStruct((1024, 1024), "float32") for name in "abcdefg"}
    state = jax.eval_shape(train.init, params)
    batch = jax.ShapeDtypeStruct((64 * mesh.size, 1024), "float32")
    report = pj.overlap.inspect(train, state, batch)
    assert len(report.collectives) == 4
    alone = pj.overlap.inspect(train, state, batch, compiler_options={})
    assert len(alone.collectives) == 1
    # Seven matmuls of the forward pass, and 13 of the backward pass. The first
    # all-reduce has two gradients, which four of the latter make: the last layer's
    # gradient, its input's, and those of the layer before.
    assert report.covered == pytest.approx(9 / 20)


@pytest.mark.full
@NEEDS_GPU
def test_other_options_replace_the_options_of_a_step():
    """Without its options, XLA hides less of what a local step hides with them."""
    mesh = pj.data_mesh(devices=pj.overlap.topology("h100:1x2x4"))
    train = pj.make_local_step(wide_loss, optax.sgd(0.1), mesh=mesh)
    params = {name: jax.ShapeDtypeStruct((256, 256), "float32") for name in "abc"}
    state = train.abstract_state(params)
    batch = jax.ShapeDtypeStruct((64 * mesh.size, 256), "float32")
    own, same, bare = (
        pj.overlap.inspect(train, state, batch, compiler_options=options).covered
        for options in (None, train.compiler_options, {})
    )
    assert own == same > bare


def test_step_inside_jit_ignores_its_options():
    """JAX takes compiler options only for whole programs, so the outer one decides."""
    train = pj.make_train_step(loss_fn, optax.sgd(0.1), mesh=pj.data_mesh(2))
    train.executor.__dict__["options"] = probe(
        train.mesh, {"xla_cpu_enable_fast_math": False}
    )
    state, (batch,) = train.init(init_params()), batches(1)
    after, _ = jax.jit(train.step)(state, batch)
    assert int(after.step) == 1
    after, _ = train.step(state, batch)
    assert int(after.step) == 1


@NEEDS_GPU
def test_pipelined_mean_in_a_user_loop_is_hidden():
    """The all-reduce overlaps all of the compute."""
    mesh = pj.data_mesh(devices=pj.overlap.topology("h100:1x8x8"))
    tx = optax.chain(pj.pipelined_mean("data"), optax.sgd(0.1))
    data = jax.sharding.PartitionSpec("data")

    def step(params, opt_state, batch):
        loss, gradients = jax.value_and_grad(wide_loss)(params, batch)
        updates, opt_state = tx.update(gradients, opt_state)
        mean = jax.lax.pmean(loss, "data")  # XLA would merge its sum with that of tx
        return optax.apply_updates(params, updates), opt_state, mean

    params = {name: jax.ShapeDtypeStruct((256, 256), "float32") for name in "abc"}
    opt_state = jax.eval_shape(tx.init, params)
    specs = pj.state_specs(opt_state)
    replicated = jax.sharding.PartitionSpec()
    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(replicated, specs, data),
        out_specs=(replicated, specs, replicated),
        check_vma=False,
    )
    whole = jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(
            (x.shape[0] * (mesh.size if spec == data else 1), *x.shape[1:]), x.dtype
        ),
        opt_state,
        jax.tree.broadcast(specs, opt_state, is_leaf=lambda x: x is data),
    )
    batch = jax.ShapeDtypeStruct((64 * mesh.size, 256), "float32")
    given = (params, whole, batch)
    hidden = pj.overlap.inspect(
        jax.jit(mapped), *given, compiler_options=pj.compiler_options(mesh)
    )
    of_gradients, of_loss = hidden.collectives
    assert of_gradients.asynchronous
    assert (of_gradients.share, of_loss.bytes) == (1, 4)


def wide_loss(params, batch):
    for w in params.values():
        batch = jax.numpy.tanh(batch @ w)
    return (batch**2).mean()
