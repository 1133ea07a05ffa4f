"""Tests a parameter server's updates, and that PyTorch has the same models."""

import socket

import chex
import jax
import numpy as np
import optax
import pytest

from experiments import methods
from experiments.methods import Problem, TextProblem
from experiments.methods._parameter_server import AsynchronousServer

from ..grid import each

PROBLEM = Problem("mlp", batch_size=8)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("to be or not to be, that is the question. " * 30)
    return path


@pytest.fixture
def port(monkeypatch):
    """Returns a free port, and sets the environment of two hosts on this machine."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        free = probe.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    return free


def test_server_applies_each_gradient_on_arrival(port, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    first = AsynchronousServer(PROBLEM, port)
    monkeypatch.setenv("RANK", "1")
    second = AsynchronousServer(PROBLEM, port)
    batches = [PROBLEM.random_batch(host) for host in (0, 1)]

    gradient = jax.jit(jax.grad(PROBLEM.loss))
    tx, params = PROBLEM.optimizer, PROBLEM.start
    state = tx.init(params)
    known = [params, params]  # the parameters that each worker has received last
    for host in (0, 1, 0, 1):
        (first, second)[host].step(batches[host])
        # The gradient is taken at the worker's parameters, not at the server's.
        stale = gradient(known[host], batches[host])
        updates, state = tx.update(stale, state, params)
        params = known[host] = optax.apply_updates(params, updates)
    # Both have these: one is beside the server, and the other received them last.
    for worker in (first, second):
        chex.assert_trees_all_close(worker.params(), params, rtol=1e-4, atol=1e-6)
    second.close()
    first.close()


def test_learning_rate_falls_to_zero():
    tx = Problem("mlp", steps=4).optimizer
    params = gradient = {"w": np.ones(3, np.float32)}
    state, sizes = tx.init(params), []
    for _ in range(5):
        updates, state = tx.update(gradient, state, params)
        sizes.append(float(np.abs(updates["w"]).max()))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[2] == pytest.approx(sizes[0] / 2, rel=1e-3)  # half of the way
    assert sizes[4] == 0


@pytest.mark.parametrize(
    "model", each(["mlp", "wide_mlp", "cnn", "resnet18"], full=["cnn", "resnet18"])
)
def test_pytorch_has_the_same_models(model):
    torch = pytest.importorskip("torch")
    from experiments.methods import _torch_images

    problem = Problem(model, batch_size=2)
    params, images = problem.start, problem.random_batch(0)["image"]
    # A block of ResNet starts as its shortcut, because scales of 0 hide its branch.
    params = jax.tree.map(lambda x: x + 0.01, params)
    module = _torch_images.MODELS[model](problem.image_shape)
    _torch_images.load(module, params)
    wanted = problem.net.apply({"params": params}, images, train=False)
    with torch.no_grad():
        got = module(torch.from_numpy(images)).numpy()
    np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-3)
    found = _torch_images.flax_params(module)
    jax.tree.map(np.testing.assert_array_equal, found, params)


def test_pytorch_has_the_same_transformer_and_steps(text, port, monkeypatch):
    torch = pytest.importorskip("torch")
    from experiments.methods._ddp import DDP
    from experiments.methods._torch_text import TextTwin

    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    problem = TextProblem(text, steps=4, context=8, layers=2, learning_rate=0.1)
    method = DDP(TextTwin(problem), port, "none", 1)
    tx, params = problem.optimizer, problem.start
    state, batches = tx.init(params), problem.batches(0, 1)
    for _ in range(3):
        batch = next(batches)
        loss, gradient = jax.value_and_grad(problem.loss)(params, batch)
        own = method._twin.loss(method._twin.module, batch)
        assert own.item() == pytest.approx(float(loss), rel=1e-5)
        updates, state = tx.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        method.step(batch)
    torch.distributed.destroy_process_group()
    # AdamW divides by the size of a gradient, which is uncertain where it is tiny.
    chex.assert_trees_all_close(method.params(), params, atol=5e-3)


def test_hosts_share_the_batches_of_a_text(text):
    problem = TextProblem(text, batch_size=2, context=8)
    first, second = (next(problem.batches(host, 2))["tokens"] for host in (0, 1))
    both = next(TextProblem(text, batch_size=4, context=8).batches(0, 1))["tokens"]
    np.testing.assert_array_equal(np.concatenate([first, second]), both)


def test_validation_has_every_window_once(text):
    problem = TextProblem(text, context=1)  # more windows than are tested at once
    splits, letters = problem.splits, text.read_text()
    tokens = np.unique(list(letters), return_inverse=True)[1]
    np.testing.assert_array_equal(splits.train, tokens[: len(splits.train)])
    rest = tokens[len(splits.train) :]
    inputs = splits.validation[:, :-1].reshape(-1)
    np.testing.assert_array_equal(inputs, rest[: inputs.size])
    assert len(rest) - 1 - inputs.size < 1
    # Parts of different sizes weigh by their size.
    wanted = jax.jit(problem.loss)(problem.start, {"tokens": splits.validation})
    assert problem.test(problem.start) == pytest.approx(float(wanted), rel=1e-5)


def test_missing_pytorch_is_reported_with_its_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(methods.NotInstalledError, match=r"pip install 'pipejax\[peers"):
        methods.make("DDP", PROBLEM)


def test_unknown_method_is_refused():
    with pytest.raises(ValueError, match="`name` must be one of compute, PS-Sync"):
        methods.make("Pipe", PROBLEM)


def test_flags_of_a_problem_describe_the_problem():
    flags = Problem("cnn", 4, seed=3).flags()
    assert flags[:4] == ["--problem.model", "cnn", "--problem.batch-size", "4"]
    assert Problem("wide_mlp").elements == 4_093_450
