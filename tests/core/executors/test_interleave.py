"""Tests stages woven between segments of compute: their results and their order."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pipejax as pj
from pipejax import overlap
from pipejax._core.executors._interleave import fractions, interleave
from pipejax._core.message import Message
from pipejax.collectives import Layout, Stages, hierarchical
from pipejax.collectives._stages import Local, Sent, local

from ...helpers import assert_bits_equal

LAYERS = 4
WEIGHTS = jnp.asarray(np.random.default_rng(0).normal(size=(LAYERS, 3, 3)), jnp.float32)
X = jnp.ones((2, 3))


def layers(weights, x):
    """Applies a matmul for each layer, without any other multiplication."""
    for i in range(LAYERS):
        x = jnp.tanh(x @ weights[i])
    return {"out": x}


def append(digit):
    """Returns a function that appends a digit to every array by multiplying by 10."""
    return lambda arrays: jax.tree.map(lambda x: x * 10 + digit, arrays)


def counted(value, states):
    return value, {"times": states["times"] + 1}


def appending(count):
    """Returns `count` stages, which append 1, 2, ..., and a finish that appends 9."""
    stages = Stages(())
    for digit in range(1, count + 1):
        stages += Stages((Local(counted), Sent(append(digit), ())))
    return stages + local(append(9))


@pytest.mark.parametrize(("count", "digits"), [(0, 9), (1, 19), (2, 129), (3, 1239)])
def test_interleaved_results_equal_each_alone(count, digits):
    """Gradients start at 0, and changes of model state at 5."""
    message = Message({"w": jnp.zeros(1)}, {"mean": jnp.full(1, 5.0)})
    states = {"times": jnp.zeros(1, jnp.int32)}
    total, after, out = interleave(
        message, states, appending(count), layers, WEIGHTS, X
    )
    changes = int("5" + str(digits))
    assert_bits_equal(total.gradients, {"w": np.float32([digits])})
    assert_bits_equal(total.changes, {"mean": np.float32([changes])})
    assert_bits_equal(after, {"times": np.int32([count])})
    assert_bits_equal(out, layers(WEIGHTS, X))


NAMES = {"mul": "stage", "dot_general": "layer", "optimization_barrier": "barrier"}


def woven(count):
    """Returns the equations of stages, layers and barriers in order."""
    message, stages = Message({"w": jnp.zeros(1)}), appending(count)
    states = {"times": jnp.zeros(1, jnp.int32)}
    program = jax.make_jaxpr(
        lambda *args: interleave(*args[:2], stages, layers, *args[2:])
    )
    equations = program(message, states, WEIGHTS, X).jaxpr.eqns
    return [x for x in equations if x.primitive.name in NAMES]


@pytest.mark.parametrize(
    ("count", "order"),
    [
        # All layers are traced as one segment, and first.
        (1, [*["layer"] * 4, "stage", "barrier"]),
        (2, ["stage", "layer", "layer", "barrier"] * 2),
        (4, ["stage", "layer", "barrier"] * 4),
    ],
)
def test_barrier_follows_each_stage_and_its_share_of_layers(count, order):
    """Each barrier holds back the sum, the states, and what the segment hands on."""
    equations = woven(count)
    names = [NAMES[equation.primitive.name] for equation in equations]
    assert names == [*order, "stage"], "the last is the finish"
    barriers = [x for x in equations if NAMES[x.primitive.name] == "barrier"]
    assert all(len(barrier.invars) >= 3 for barrier in barriers)
    assert len(barriers[-1].invars) == 3


def test_next_stage_and_layer_wait_for_the_barrier():
    """The next stage reads the sum, and the next layer the last layer's output."""
    _, _, _, first, stage, layer, _, second, finish = woven(2)
    for barrier, following in ((first, stage), (first, layer), (second, finish)):
        assert any(x is y for x in barrier.outvars for y in following.invars)


def test_links_between_hosts_have_most_of_the_compute():
    """Devices of a host send each other most of the bytes, on far quicker links."""
    layout = Layout.of_shapes(((1024,),))
    found = []

    def total(_):
        found.append(hierarchical()(layout, ("host", "device")))

    within = jax.vmap(total, axis_name="device")
    jax.vmap(within, axis_name="host")(jnp.zeros((2, 4)))
    shares = fractions(found[0])
    assert len(shares) == 4
    assert sum(shares) == pytest.approx(1)
    assert shares[1] + shares[2] > 0.8
    assert min(shares) > 0


def test_compiled_levels_hide_the_links_between_hosts():
    mesh = pj.data_mesh(
        devices=overlap.topology("h100:1x2x4"), axis_name=("host", "device"), hosts=2
    )

    def loss(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    train = pj.make_train_step(
        loss,
        optax.sgd(0.1),
        mesh=mesh,
        axis_name=("host", "device"),
        all_reduce=hierarchical(),
    )
    params = [jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 8
    batch = jax.ShapeDtypeStruct((8 * 256, 512), jnp.float32)
    report = overlap.inspect(train, train.abstract_state(params), batch)
    assert report.covered_by["host",] > 0.7
    assert report.covered_by["device",] > 0.1
