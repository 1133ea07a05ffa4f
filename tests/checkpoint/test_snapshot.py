"""Tests that a run continues from snapshots with the same bits."""

import shutil

import jax
import jax.numpy as jnp
import optax
import pytest

import pipejax as pj
from pipejax import checkpoint
from pipejax.codecs import error_feedback, int8
from pipejax.collectives import two_shot

from ..groups import batches as group_batches
from ..groups import local_step, mesh_of, placed
from ..helpers import assert_bits_equal, batches, init_params, loss_fn
from . import zoo
from .helpers import host, init, train_step
from .snapshots.runs import broken_off, every_step, run, settled

FEEDBACK, HOSTS = two_shot(error_feedback(int8(8))), ("host", "device")


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    every_step(monkeypatch)


@pytest.fixture
def memory(tmp_path):
    folder = tmp_path / "memory"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("executor", ["fused", "host"])
@pytest.mark.parametrize(
    ("axes", "donate"), [("data", False), ("data", True), (HOSTS, True)]
)
def test_run_continues_with_the_same_bits(tmp_path, memory, executor, axes, donate):
    train = pj.make_train_step(
        loss_fn,
        optax.adamw(1e-2),
        mesh=pj.data_mesh(4, axis_name=axes, hosts=2 if axes == HOSTS else None),
        axis_name=axes,
        all_reduce=FEEDBACK,
        executor=executor,
        donate=donate,
    )
    data, state = batches(8), train.init(init_params())
    for batch in data:
        state, _ = train.step(state, batch)
    with broken_off(tmp_path / "run", memory) as manager:
        run(manager, train, train.init(init_params()), data[:5])
    with checkpoint.manager(tmp_path / "run", memory=memory) as manager:
        assert manager.latest_step() == 5
        found = checkpoint.restore(manager, train, train.init(init_params()))
        assert manager.latest_step() is None  # there is no checkpoint
        again = run(manager, train, found.state, data[5:])
    assert_bits_equal(host(again.params), host(state.params))


@pytest.mark.parametrize("executor", ["fused", "host"])
def test_local_steps_continue_inside_a_round(tmp_path, memory, executor):
    mesh = mesh_of(2, "fsdp")
    train = local_step(
        mesh,
        outer_tx=optax.sgd(0.7, momentum=0.9),
        sync_every=4,
        overlap_steps=3,
        all_reduce=FEEDBACK,
        executor=executor,
    )
    start = placed(mesh, "fsdp")
    names = mesh.axis_names[:2]
    data = [train.batch(x, axis_name=names) for x in group_batches(9)]
    state = train.init(start)
    for batch in data:
        state, _ = train.step(state, batch)
    with broken_off(tmp_path / "run", memory) as manager:
        run(manager, train, train.init(start), data[:6])
    with checkpoint.manager(tmp_path / "run", memory=memory) as manager:
        found = checkpoint.restore(manager, train, train.abstract_state(start))
        assert found.extras == {"step": 6}
        again = run(manager, train, found.state, data[6:])
    assert_bits_equal(host(again.local), host(state.local))


def test_every_kind_of_leaf_is_restored(tmp_path, memory):
    train = zoo.train_step(4)
    state = zoo.filled_at_random(zoo.init(train))
    with broken_off(tmp_path / "run", memory) as manager:
        assert checkpoint.snapshot(manager, state)
    with checkpoint.manager(tmp_path / "run", memory=memory) as manager:
        like = jax.eval_shape(lambda: zoo.init(train))
        found = checkpoint.restore(manager, train, like)
    zoo.assert_same(found.state, state)


def test_emptied_folder_of_checkpoints_is_another_job(tmp_path, memory):
    train = train_step(2)
    with broken_off(tmp_path / "run", memory) as manager:
        run(manager, train, init(train), batches(3))
    shutil.rmtree(tmp_path / "run")
    with checkpoint.manager(tmp_path / "run", memory=memory) as manager:
        assert manager.latest_step() is None
        with pytest.raises(FileNotFoundError, match="must have a checkpoint"):
            checkpoint.restore(manager, train, init(train))


def test_snapshots_survive_a_start_on_other_devices(tmp_path, memory):
    """Without a checkpoint, such a start is refused, and says how to go on."""
    train, other = train_step(4), train_step(2)
    with broken_off(tmp_path / "run", memory) as manager:
        run(manager, train, init(train), batches(3))
    with broken_off(tmp_path / "run", memory) as manager:
        rule = rf"got none in .*{memory}.* on the same devices as before, or remove"
        with pytest.raises(FileNotFoundError, match=rule):
            checkpoint.restore(manager, other, init(other))
    with broken_off(tmp_path / "run", memory) as manager:
        assert int(checkpoint.restore(manager, train, init(train)).state.step) == 3
    for path in memory.iterdir():
        shutil.rmtree(path)
    with checkpoint.manager(tmp_path / "run", memory=memory) as manager:
        run(manager, other, init(other), batches(1))


def test_run_without_a_restore_is_refused(tmp_path, memory):
    train = train_step(2)
    with broken_off(tmp_path / "run", memory) as manager:
        run(manager, train, init(train), batches(3))
    rule = r"must be of a later step than the snapshots in .* got step 1 .* of step 3"
    refused = pytest.raises(ValueError, match=rule)
    with refused, checkpoint.manager(tmp_path / "run", memory=memory) as manager:
        run(manager, train, init(train), batches(1))


def test_bad_input_is_refused(tmp_path, memory):
    train = train_step(2)
    state = init(train)
    refused = pytest.raises(ValueError, match="must have a folder for snapshots")
    with checkpoint.manager(tmp_path / "run") as manager, refused:
        checkpoint.snapshot(manager, state)
    with pytest.raises(ValueError, match="must be open"):
        checkpoint.snapshot(manager, state)
    refused = pytest.raises(ValueError, match=r"`state` must be the pj.PipelineState")
    with refused, checkpoint.manager(tmp_path / "run", memory=memory) as manager:
        checkpoint.snapshot(manager, {"w": 1})
    refused = pytest.raises(ValueError, match="`extras` must be")
    with refused, checkpoint.manager(tmp_path / "run", memory=memory) as manager:
        checkpoint.snapshot(manager, state, {"n": jnp.ones(3)})
    with pytest.raises(ValueError, match=r"`memory` must name a folder, .* got 3"):
        checkpoint.manager(tmp_path / "run", memory=3)
    with pytest.raises(ValueError, match="`memory` must be None if `read_only`"):
        checkpoint.manager(tmp_path / "run", read_only=True, memory=memory)


def test_states_can_be_donated_after_a_snapshot(tmp_path, memory):
    train = train_step(4)  # it donates
    with broken_off(tmp_path / "run", memory) as manager:
        state = run(manager, train, init(train), batches(6))
        settled(manager)
        kept = host(state)
        train.step(state, batches(7)[6])
    with checkpoint.manager(tmp_path / "run", memory=memory) as manager:
        found = checkpoint.restore(manager, train, init(train))
    assert_bits_equal(host(found.state), kept)


def test_snapshot_replaces_a_newer_damaged_checkpoint(tmp_path, memory):
    train, data = train_step(2), batches(6)
    with broken_off(tmp_path / "run", memory) as manager:
        state = run(manager, train, init(train), data[:4], save_at=(2,))
        state, _ = train.step(state, data[4])
        checkpoint.save(manager, state, {"step": 5})
    (tmp_path / "run" / "5" / "extras" / "metadata").write_text('{"step": 7}')
    with checkpoint.manager(tmp_path / "run", memory=memory) as manager:
        found = checkpoint.restore(manager, train, init(train))
        assert found.extras == {"step": 4}
        run(manager, train, found.state, data[4:], save_at=(5,))


@pytest.mark.parametrize("step", [None, 4])
def test_snapshot_replaces_the_only_checkpoint_if_damaged(tmp_path, memory, step):
    train, data = train_step(2), batches(6)
    with broken_off(tmp_path / "run", memory) as manager:
        state = run(manager, train, init(train), data[:4], save_at=(4,) if step else ())
        state, _ = train.step(state, data[4])
        if not step:
            checkpoint.save(manager, state, {"step": 5})
    for path in (tmp_path / "run").glob("*/extras/metadata"):
        path.write_text('{"step": 7}')
    with checkpoint.manager(tmp_path / "run", memory=memory) as manager:
        found = checkpoint.restore(manager, train, init(train), step)
        assert found.extras == {"step": 4}
        run(manager, train, found.state, data[4:], save_at=(5,))


def test_save_before_the_newest_snapshot_is_refused(tmp_path, memory):
    train, data = train_step(2), batches(4)
    with broken_off(tmp_path / "run", memory) as manager:
        run(manager, train, init(train), data[:3])
    rule = r"`state` must be of a later step than the snapshots .* step 1 .* of step 3"
    state, _ = train.step(init(train), data[0])
    refused = pytest.raises(ValueError, match=rule)
    with checkpoint.manager(tmp_path / "run", memory=memory) as manager, refused:
        checkpoint.save(manager, state)
