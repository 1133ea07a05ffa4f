"""Tests the Python code of a train step against code by hand, and runs it."""

import re

import jax.numpy as jnp
import optax
import pytest

from pipejax.cli._snippet import about_predictions, snippet
from pipejax.timing import Cluster, Link, TrainConfig

from .helpers import GIVEN, plan


def hosts(count, devices=1):
    inner = Link(0.0, 1e9) if devices > 1 else None
    return Cluster(count, Link(0.0, 1e9), devices, inner)


def test_snippet_without_a_codec_equals_text_by_hand():
    assert snippet(TrainConfig(1, "tree"), hosts(4)) == (
        "# width 1, tree, uncompressed, with your loss_fn and optimizer tx:\n"
        "import pipejax as pj\n"
        "\n"
        "mesh = pj.data_mesh()\n"
        "train = pj.make_train_step(\n"
        "    loss_fn,\n"
        "    tx,\n"
        "    mesh=mesh,\n"
        "    width=1,\n"
        "    all_reduce=pj.collectives.tree(),\n"
        ")"
    )


def test_snippet_with_hosts_and_feedback_equals_text_by_hand():
    assert snippet(TrainConfig(2, "ring", "sign", levels=True), hosts(4, 8)) == (
        "# width 2, hierarchical, ring, sign, with your loss_fn and optimizer tx:\n"
        "import pipejax as pj\n"
        "\n"
        'mesh = pj.data_mesh(axis_name=("host", "device"), hosts=4)\n'
        'codec = pj.codecs.error_feedback(pj.codecs.named("sign"))\n'
        "train = pj.make_train_step(\n"
        "    loss_fn,\n"
        "    tx,\n"
        "    mesh=mesh,\n"
        '    axis_name=("host", "device"),\n'
        "    width=2,\n"
        "    all_reduce=pj.collectives.hierarchical("
        "outer=pj.collectives.ring(codec)),\n"
        ")"
    )


def test_snippet_names_the_hosts_of_a_mesh_of_two_axes():
    """Several processes may share a host, which `pj.data_mesh` cannot know."""
    levels = snippet(TrainConfig(2, "ring", levels=True), hosts(4, 8))
    assert 'pj.data_mesh(axis_name=("host", "device"), hosts=4)' in levels
    sharded = snippet(TrainConfig(2, "ring"), hosts(4), inner="fsdp")
    assert 'pj.data_mesh(axis_name=("host", "fsdp"), hosts=4)' in sharded
    assert "pj.data_mesh()" in snippet(TrainConfig(2, "ring"), hosts(4, 8))


def test_snippet_of_local_steps_equals_text_by_hand():
    way = TrainConfig(1, "two_shot", "int8", sync_every=12, overlap_steps=12)
    assert snippet(way, hosts(4, 8), inner="device") == (
        "# H = 12, V = 12, two_shot, int8, with your loss_fn and optimizer tx:\n"
        "import pipejax as pj\n"
        "\n"
        'mesh = pj.data_mesh(axis_name=("host", "device"), hosts=4)\n'
        'codec = pj.codecs.error_feedback(pj.codecs.named("int8"))\n'
        "train = pj.make_local_step(\n"
        "    loss_fn,\n"
        "    tx,\n"
        "    mesh=mesh,\n"
        '    axis_name="host",\n'
        "    sync_every=12,\n"
        "    overlap_steps=12,\n"
        "    all_reduce=pj.collectives.two_shot(codec),\n"
        ")"
    )


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--hosts", "4", "--bandwidth", "10gbit"), "pj.collectives.ring(codec)"),
        ((*GIVEN, "--device", "h100"), 'error_feedback(pj.codecs.named("int4"))'),
        ((*GIVEN, "--device", "h100", "--row", "4"), 'named("power_sgd"))'),
        (GIVEN, "hierarchical(outer=pj.collectives.ring(codec))"),
        (("--hosts", "1", "--bandwidth", "10gbit"), "width=1,"),
        (
            ("--hosts", "4", "--bandwidth", "100mbit", "--local-steps"),
            'error_feedback(pj.codecs.named("int4"))',
        ),
    ],
)
def test_last_lines_of_a_plan_are_a_program(flags, says, capsys):
    assert plan(*flags, parameters="300M", compute="250") == 0
    *_, program = re.split(r"\n\n(?=# )", capsys.readouterr().out)
    assert says in program
    names = {"loss_fn": loss_fn, "tx": optax.sgd(0.01)}
    exec(program, names)
    train = names["train"]
    state = train.init({"w": jnp.ones((16, 12))})
    for _ in range(3):
        state, info = train.step(state, jnp.ones((8, 16)))
    assert int(jnp.max(info.skipped)) == 0
    state, _ = train.drain(state)
    assert float(jnp.max(state.params["w"])) < 1


def test_several_replicas_get_advice_with_a_delay():
    piped = TrainConfig(2, "ring")
    assert "at_once=pj.codecs.power_sgd" in about_predictions(piped, hosts(2))[0]
    assert about_predictions(piped, hosts(1)) == []
    assert about_predictions(TrainConfig(1, "ring"), hosts(64)) == []


@pytest.mark.parametrize(
    ("hosts", "flags", "named"),
    [
        (1, ["--device", "h100"], True),
        (4, [], True),
        (8, ["--shard-optimizer"], False),
    ],
)
def test_plan_of_several_replicas_names_a_part_at_once(capsys, hosts, flags, named):
    where = "--hosts", str(hosts), "--devices", "8", "--bandwidth", "10gbit"
    assert plan(*where, *flags, parameters="300M", compute="250") == 0
    assert ("`at_once=" in capsys.readouterr().out) == named
