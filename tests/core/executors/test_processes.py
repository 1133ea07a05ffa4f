"""Tests several processes over Gloo, started as a user would start hosts."""

import contextlib
import re
import signal
import subprocess
import time

import jax
import numpy as np
import optax
import pytest

import pipejax as pj
from pipejax import checkpoint

from ...helpers import batches, init_params, loss_fn
from . import local_steps, own_collectives, pieces, sharded, stateful
from .group import Group
from .worker import (
    WITH_CODECS,
    bits,
    coded_step,
    distilled,
    fed_back,
    frozen_step,
    in_rank_order,
    noisy_loss,
    partly_delayed_step,
    run,
)

FULL = pytest.mark.full
MARKS = 2 * 4
"""Bytes by which processes compare their calls beside two chunks."""


@pytest.fixture(scope="module")
def ask():
    """Returns a function that asks a shared group, and replaces a failed one."""
    groups = {}

    def asked(task, *arguments, processes=2):
        if processes in groups and not groups[processes].alive:
            groups.pop(processes).close()
        if processes not in groups:
            groups[processes] = Group(processes)
        return groups[processes].ask(task, *arguments)

    yield asked
    for group in groups.values():
        group.close()


def test_other_examples_inside_a_group_are_refused(ask):
    """Both processes hold a shard of each weight, and compute with the same rows."""
    first, second = ask("sharded_fed")
    assert first == second
    assert re.match(
        r"`batch\['x'\]` must have the same examples on all processes of a group of"
        r" devices, .* on some\. Split them inside the group, too, with `train.batch",
        first.pop("other parts"),
    )
    assert first["split inside"] == pytest.approx(first["same parts"])


def test_each_process_gives_its_own_part_of_a_batch(ask):
    first, second = ask("fed")
    (whole,) = batches(1)
    for found in (first, second):
        assert found["shapes"] == [list(x.shape) for x in jax.tree.leaves(whole)]
        assert found["own"]
        for kind, said in zip(("ndarray", "ArrayImpl"), found["refusals"], strict=True):
            assert "`batch` must be a global array on a mesh of several" in said
            assert kind in said
            assert "`train.step(state, train.batch(part))`" in said
        assert found["fewest"] == 6


@pytest.mark.parametrize("local", [False, pytest.param(True, marks=FULL)])
@pytest.mark.parametrize("executor", ["fused", "host"])
def test_calls_of_two_processes_are_compared(ask, executor, local):
    """Otherwise, gradients of different calls would be added up silently."""
    for found, alike in ask("apart", executor, local):
        for (said,) in found.values():
            assert "must be called in the same order on every process, with a" in said
            assert "Give `train.batch` as many examples on every process, take" in said
        assert alike == []


def test_frozen_parameters_are_not_sent_between_processes(ask):
    """The parameters have the bits of a run on two devices of one process."""
    (name, sent, found), other = ask("frozen")
    assert [name, sent, found] == other
    assert name == "host"
    assert sent == 4 * (7 * 3 + 2)  # the layer that is trained, the loss, and a mark
    assert found == bits(run(frozen_step(), 4).params)


@pytest.mark.one_python
def test_partly_delayed_gradients_have_the_bits_of_one_process(ask):
    (said, name, sent, found), other = ask("partly_delayed")
    assert [said, name, sent, found] == other
    assert "`delayed['hidden']` must be the same on every process" in said
    assert name == "host"
    count = sum(x.size for x in jax.tree.leaves(init_params()))
    assert sent == 4 * (count + 3)  # the loss goes with both kinds, a mark with one
    assert found == bits(run(partly_delayed_step(), 4).params)


@FULL  # in the quick run, tests/internal/test_leaving.py and tests/launch
def test_process_interrupted_in_a_wait_leaves(tmp_path):
    group, end = Group(2), time.monotonic() + 120
    with contextlib.closing(group):
        group.begin("interrupted", tmp_path)
        while len(list(tmp_path.glob("waiting*"))) < 2:
            assert group.alive, group.said(0) + group.said(1)
            assert time.monotonic() < end
            time.sleep(0.05)
        waiting = group.running[0]
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(2)  # the process is waiting
        waiting.send_signal(signal.SIGINT)
        assert waiting.wait(60) == 130
        assert "KeyboardInterrupt" in group.said(0)
        assert "leaving without it" in group.said(0)


@pytest.mark.parametrize(
    ("processes", "widths"),
    [
        (2, (3,)),
        pytest.param(2, (1, 2), marks=FULL),
        pytest.param(4, (1, 2, 3), marks=FULL),
    ],
)
def test_several_processes_have_the_bits_of_one(ask, processes, widths):
    """The host executor is chosen with a reason, and all ranks agree at all widths."""
    first, *others = ask("exact", *widths, processes=processes)
    assert all(other == first for other in others)
    assert first["executor"] == "host"
    assert f"{processes} processes on CPU" in first["reason"]
    for width in widths:
        train = pj.make_train_step(
            loss_fn,
            optax.adamw(1e-2),
            mesh=pj.data_mesh(processes),
            width=width,
            all_reduce=in_rank_order(processes),
        )
        state = train.init(init_params())
        for batch in batches(6):
            state, _ = train.step(state, batch)
        assert bits(train.drain(state)[0].params) == first["params"][str(width)]


@FULL  # in the quick run, checkpoints of two processes have codecs
@pytest.mark.parametrize("processes", [2, 4])
def test_several_processes_with_codecs_have_the_bits_of_one(ask, processes):
    """Each process keeps its devices' own residuals, keys and warm starts."""
    first, *others = ask("coded", processes=processes)
    assert all(other == first for other in others)
    assert first.keys() == set(WITH_CODECS)
    for name in WITH_CODECS:
        train = coded_step(name, processes)
        state = train.init(init_params())
        for batch in batches(6):
            state, _ = train.step(state, batch)
        assert bits(train.drain(state)[0].params) == first[name]


def test_checkpoint_of_two_processes_continues_in_one(ask, tmp_path):
    assert ask("saved", tmp_path) == [None, None]
    alone = tmp_path / "alone"
    state = run(train := fed_back(2), 4, drained=False)
    with checkpoint.manager(alone) as manager:
        checkpoint.save(manager, state)
    state = run(train, 4, state)
    assert goes_on(tmp_path, 2) == goes_on(alone, 2) == bits(state.params)


@pytest.mark.parametrize("devices", [2, pytest.param(4, marks=FULL)])
def test_checkpoint_of_one_process_continues_in_two(ask, tmp_path, devices):
    """The new run has as many devices or twice as many, which get the residuals."""
    with checkpoint.manager(tmp_path) as manager:
        checkpoint.save(manager, run(fed_back(devices), 4, drained=False))
    first, second = ask("restored", tmp_path)
    assert first == second == goes_on(tmp_path, 2)


def goes_on(folder, devices):
    """Returns the parameters of the same run in this process."""
    train = fed_back(devices)
    with checkpoint.manager(folder) as manager:
        state = checkpoint.restore(manager, train, train.init(init_params())).state
    return bits(run(train, 4, state).params)


@FULL  # in the quick run, test_own_collectives.py has one process
@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("name", ["sync batch norm", "scalar", "optimizer"])
def test_own_collectives_of_two_processes_have_the_bits_of_one(ask, name, width):
    """The step runs in one program, and gives the bits of one process."""
    first, second = ask("own_collective", name, width)
    assert first == second
    reason = "`loss_fn` or `tx` has a collective between processes, all-reduce (jit"
    assert first["executor"] == "fused"
    assert first["reason"].startswith(reason)
    said = "`executor` must not be 'host' on CPUs of several processes where"
    assert first["said"].startswith(f"{said} {reason}")
    train, state = own_collectives.make(name, pj.data_mesh(2), width)
    (batch,) = batches(1)
    # In one process, short arrays do not travel together.
    alone = [list(x) for x in train.transfers(state, batch)]
    assert len(first["sent"]) < len(alone)
    assert {kind for kind, _, _ in first["sent"]} == {kind for kind, _, _ in alone}
    # Processes also compare a mark of 4 bytes.
    assert sum(x for *_, x in first["sent"]) == sum(x for *_, x in alone) + 4
    state = own_collectives.trained(train, state)
    assert bits(state.params) == first["params"]
    assert bits(state.model_state) == first["model_state"]


@pytest.mark.one_python
@pytest.mark.parametrize("kind", [pytest.param("typed", marks=FULL), "raw"])
def test_random_keys_of_two_processes_have_the_bits_of_one(ask, kind):
    first, second = ask("keyed", kind)
    assert first == second
    train = pj.make_train_step(noisy_loss, optax.sgd(0.1), mesh=pj.data_mesh(2))
    key = {"typed": jax.random.key, "raw": jax.random.PRNGKey}[kind](0)
    state = run(train, 3, train.init(init_params(), rng=key), drained=False)
    assert first["again"] == bits(state.params)
    assert first["params"] == bits(run(train, 3, state).params)


@pytest.mark.one_python
def test_static_objects_may_differ_between_processes(ask):
    """Processes compare structures without static objects, which differ there."""
    first, second = ask("stateful")
    assert first == second
    assert first["sent"] == ["last", "wave"]
    train, state = stateful.make(pj.data_mesh(2))
    state = run(train, 5, state)
    assert first["params"] == bits(state.params.params)
    assert first["model_state"] == bits(state.model_state)


@pytest.mark.one_python
@pytest.mark.parametrize("name", ["out", "rng", "structure"])
def test_input_differing_between_processes_is_refused(ask, name):
    message = {
        "out": "`params['out']` must be the same on every process, because",
        "rng": "`rng` must be the same on every process, because",
        "structure": "`train.init` must be given the same structure of arrays on every",
    }[name]
    for said in ask("differing", name):
        assert said.startswith(message)
        assert "on processes [1] than on process 0" in said


@pytest.mark.one_python
@pytest.mark.parametrize(
    "name",
    [
        "width",
        "all_reduce",
        "warmup_steps",
        "weight_prediction",
        "reduce_dtype",
        "executor",
        "sync_every",
        "tx",
        "batch",
    ],
)
def test_train_step_or_batch_of_another_kind_on_one_process_is_refused(ask, name):
    """The job would wait forever, or add up what does not belong together."""
    for said in ask("unlike", name):
        assert said.startswith(f"`{name}` must ")
        assert " on every process" in said
        assert "on processes [1] than on process 0" in said


@pytest.mark.parametrize("executor", ["host", pytest.param("fused", marks=FULL)])
def test_shared_input_of_two_processes_has_the_bits_of_one(ask, executor):
    """They compare it in the first step. Later ones launch no collective for it."""
    (first, said), (second, _) = ask("shares", executor)
    assert first == second
    assert said.startswith("`shared['scale']` must be the same on every process")
    train = pj.make_train_step(distilled, optax.sgd(0.1), mesh=pj.data_mesh(2))
    state, teacher = train.init(init_params()), np.ones((5, 3), np.float32)
    for step, batch in enumerate(batches(4)):
        shared = {"teacher": teacher, "scale": 0.5**step}
        state, _ = train.step(state, batch, shared)
        teacher = state.params["hidden"][:, :3]
    assert first == bits(train.drain(state)[0].params)


MIXTURES = {
    "sweep": (2, ("host", "host", "pipelined")),
    "kinds": (2, ("host", "fused", "sharded optimizer")),
    "wide": (2, ("wide", "synchronous", "host")),
    "four": (4, ("host", "fused", "sharded optimizer", "pipelined")),
}


@pytest.mark.one_python  # the processes work for 20 processor seconds
@pytest.mark.parametrize(
    ("name", "seed", "count"),
    [
        pytest.param("sweep", 0, 40, marks=FULL),
        ("kinds", 1, 40),
        *(pytest.param(x, seed, 100, marks=FULL) for x in MIXTURES for seed in (2, 3)),
    ],
)
def test_several_train_steps_keep_their_sums_apart(ask, name, seed, count):
    """Their sums do not meet, whatever the order of steps, drains and beginnings."""
    processes, kinds = MIXTURES[name]
    found = ask("of_kinds", seed, count, *kinds, processes=processes)
    assert found == [[]] * processes


@FULL  # the processes of this group compile programs for two devices
@pytest.mark.parametrize("seed", [0, 1])
def test_train_steps_of_sharded_models_keep_their_sums_apart(seed):
    kinds = ("sharded", "host", "both", "fused")
    with contextlib.closing(Group(2, devices=2)) as group:
        assert group.ask("of_kinds", seed, 60, *kinds) == [[], []]


@FULL
def test_collective_inside_each_process_runs_beside_the_thread():
    """The collective runs beside the communication thread."""
    with contextlib.closing(Group(2, devices=2)) as group:
        first, second = group.ask("inside")
    assert first == second
    assert first["executor"] == "host"
    for width in (2, 3):
        mesh = pj.data_mesh(4, axis_name=("host", "device"), hosts=2)
        train, state = own_collectives.make("inside", mesh, width)
        params = own_collectives.trained(train, state, 100).params
        for name, hexadecimal in first["params"][str(width)].items():
            got = np.frombuffer(bytes.fromhex(hexadecimal), np.float32)
            # Gloo adds in an order of its own, with an error of 2^-24 of order 1 in
            # each of 100 steps.
            wanted = params[name.strip("[']")].ravel()
            np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5)


@FULL
@pytest.mark.parametrize("name", ["int8", "predicted", "one program"])
def test_groups_in_two_processes_have_the_bits_of_one_process(tmp_path, name):
    """Runs continue from checkpoints bit for bit, and end with the same bits."""
    with contextlib.closing(Group(2, devices=2)) as group:
        first, second = group.ask("sharded", name, tmp_path / "two")
    assert first == second
    assert first["alike"]
    assert first["executor"] == ("fused" if name == "one program" else "host")
    here = sharded.saved_and_continued(name, tmp_path / "one")
    assert here["alike"]
    assert first["end"] == here["end"]


@FULL  # in the quick run, a sharded optimizer is among the several train steps
@pytest.mark.parametrize("name", ["predicted", "plain", "int8", "gathered"])
def test_sharded_optimizer_of_two_processes_has_the_bits_of_one(ask, tmp_path, name):
    """Runs continue from checkpoints bit for bit, and end with the same bits."""
    first, second = ask("pieces", name, tmp_path / "two")
    assert first == second
    assert first["alike"]
    assert first["executor"] == "host"
    here = pieces.saved_and_continued(name, tmp_path / "one", devices=2)
    assert here["alike"]
    assert first["end"] == here["end"]


@pytest.mark.one_python
@pytest.mark.parametrize("name", ["late", pytest.param("at once", marks=FULL)])
def test_local_steps_of_two_processes_have_the_bits_of_one(ask, tmp_path, name):
    """Two processes also continue from a checkpoint."""
    first, second = ask("local_steps", name, tmp_path)
    here = local_steps.trained(name, devices=2, executor="host")
    assert first["executor"] == "host"
    assert first["anchor"] == second["anchor"] == here["anchor"]
    assert first["losses"] == second["losses"] == here["losses"]


@FULL  # in the quick run, tests/flax/test_linen.py has one process
def test_local_steps_of_two_processes_are_written_back_to_flax(ask):
    first, second = ask("written_back")
    here = local_steps.written_back(devices=2, executor="host")
    assert first == second == {**here, "sent": here["sent"] + MARKS}
    assert first["executor"] == "host"
    assert first["step"] == 4
    assert first["measured"] == [2, 2, 2]


@FULL
def test_local_steps_of_groups_in_processes_are_written_back_to_flax():
    with contextlib.closing(Group(2, devices=2)) as group:
        first, second = group.ask("written_back")
    here = local_steps.written_back(devices=4, executor="host")
    assert first == second == {**here, "sent": here["sent"] + MARKS}


@FULL
@pytest.mark.parametrize("name", ["late", "at once"])
def test_local_steps_of_groups_in_two_processes_have_the_bits_of_one(tmp_path, name):
    with contextlib.closing(Group(2, devices=2)) as group:
        first, second = group.ask("local_steps", name, tmp_path)
    here = local_steps.trained(name, devices=4, executor="host")
    assert first["executor"] == "host"
    assert first["anchor"] == second["anchor"] == here["anchor"]
    assert first["losses"] == second["losses"] == here["losses"]


@pytest.mark.one_python  # two processes work for 20 processor seconds
@pytest.mark.parametrize("width", [pytest.param(2, marks=FULL), 3])
def test_compute_and_reduction_run_at_the_same_time(ask, width):
    for met in ask("overlapping", width):
        # Five of them wait for a reduction, and five for a compute.
        assert met == [True] * 10
