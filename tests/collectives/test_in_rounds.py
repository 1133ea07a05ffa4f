"""Tests the rounds of linear codecs that are summed with a codec of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax import codecs, collectives
from pipejax._internal.mesh import on_mesh
from pipejax.collectives import Layout, Summands
from pipejax.overlap import inspect

from .cases import KEY

DEVICES = 4
LAYOUT = Layout.of_shapes(((16, 12), (5,)), exact=3)
INT8 = collectives.two_shot(codecs.int8(8))
POWER = codecs.error_feedback(codecs.power_sgd(2, KEY))


def program(all_reduce, layout=LAYOUT):
    """Returns a program from matrices, vectors and exact parts of all devices."""

    def local(*arrays):
        *coded, exact = (x[0] for x in arrays)
        stages = all_reduce(layout, "data")
        sums, states = collectives.run(stages, Summands((*coded,), (exact,)))
        return jax.tree.map(lambda x: x[None], (sums, states))

    mesh = pj.data_mesh(DEVICES)
    return jax.jit(on_mesh(local, mesh, P("data"), P("data")))


def arrays():
    rng = np.random.default_rng(0)
    shapes = (DEVICES, 16, 12), (DEVICES, 5), (DEVICES, 3)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def summed(vectors):
    """Returns the sum that `INT8` makes of vectors, [devices, n]."""
    layout = Layout.of_shapes((vectors.shape[1:],))

    def local(x):
        stages = INT8(layout, "data")
        return collectives.run(stages, Summands((x[0],)))[0].coded[0][None]

    mesh = pj.data_mesh(DEVICES)
    return jax.jit(on_mesh(local, mesh, P("data"), P("data")))(vectors)[0]


def test_factors_are_summed_with_eight_bits():
    """The twin projects and rebuilds by hand, and sums P and Q in programs alone."""
    matrices, vectors, exact = arrays()
    sums, _ = program(collectives.in_rounds(POWER, INT8))(*arrays())
    codec = POWER.of(((16, 12), (5,)))
    leaves = [
        (jnp.asarray(m), jnp.asarray(v)) for m, v in zip(matrices, vectors, strict=True)
    ]
    begun = seeded(codec)
    p = summed(jnp.stack([codec.project(x, begun, ()) for x in leaves]))
    q = summed(jnp.stack([codec.project(x, begun, (p,)) for x in leaves]))
    wanted = codec.rebuild(begun, (p, q), 16 * 12 + 5)
    close = {"rtol": 1e-4, "atol": 1e-4}
    for got, each in zip(sums.coded, wanted, strict=True):
        np.testing.assert_allclose(got[0], each, **close)
        assert len({row.tobytes() for row in np.asarray(got)}) == 1
    np.testing.assert_allclose(sums.exact[0][0], exact.sum(axis=0), rtol=1e-6)


def seeded(codec):
    """Returns the state of the codec before the first sum, made by an all-reduce."""

    def local():
        state = collectives.psum(codec)(LAYOUT, "data").init()["psum"]
        return jax.tree.map(lambda x: x[None], state)

    mesh = pj.data_mesh(DEVICES)
    state = jax.jit(on_mesh(local, mesh, (), P("data")))()
    return jax.tree.map(lambda x: x[0], state)


def test_rounds_with_all_bits_equal_rounds_of_psum():
    """The sums of four float32 numbers are rounded three times."""
    got, _ = program(collectives.in_rounds(POWER, collectives.two_shot()))(*arrays())
    wanted, _ = program(collectives.psum(POWER))(*arrays())
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_compiled_collectives_have_the_declared_bytes():
    """P has 2 x 16 elements, and Q and the vector have 2 x 12 + 5.

    A quarter of P is one block of 8. A quarter of the rest is 8 elements, too, and the
    exact part of one.
    """
    all_reduce = collectives.in_rounds(POWER, INT8)
    declared = []

    def local():
        declared.extend(all_reduce(LAYOUT, "data").transfers)
        return jnp.zeros(1)

    jax.eval_shape(on_mesh(local, pj.data_mesh(DEVICES), (), P("data")))
    found = inspect(program(all_reduce), *arrays()).collectives
    wanted = [(x.kind, x.bytes) for x in declared]
    assert [(x.kind, x.bytes) for x in found] == wanted
    row, exact = 8 + 4, 4
    assert [x.bytes for x in declared] == [
        *(4 * row, row, 4 * (row + exact), row + exact)
    ]


def test_feedback_of_each_round_has_a_state_of_its_own():
    fed = collectives.two_shot(codecs.error_feedback(codecs.int8(8)))
    _, states = program(collectives.in_rounds(POWER, fed))(*arrays())
    places = [f"round {i} {place}" for i in (0, 1) for place in ("scatter", "gather")]
    assert set(states) == {"psum", *places}
    assert all(np.abs(states[place].residual).max() > 0 for place in places)


@pytest.mark.parametrize(
    "executor", ["fused", pytest.param("host", marks=pytest.mark.full)]
)
def test_steps_converge_with_coded_factors(executor):
    rng = np.random.default_rng(0)
    true = rng.normal(size=(16, 12)).astype(np.float32)
    x = rng.normal(size=(64, 16)).astype(np.float32)

    def loss_fn(params, batch):
        return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)

    train = pj.make_train_step(
        loss_fn,
        optax.adam(0.05),
        mesh=pj.data_mesh(DEVICES),
        width=2,
        all_reduce=collectives.in_rounds(POWER, collectives.two_shot(codecs.int8(8))),
        executor=executor,
    )
    state = train.init({"w": jnp.zeros((16, 12))})
    losses = []
    for _ in range(200):
        state, info = train.step(state, {"x": x, "y": x @ true})
        losses.append(float(info.loss))
    # The first step has no loss yet, and the second has that of the zeros, about 16.
    assert losses[-1] < 1e-3 < losses[1]


@pytest.mark.parametrize("codec", [codecs.int8(), None])
def test_rounds_need_a_linear_codec(codec):
    with pytest.raises(ValueError, match="`codec` must be linear, "):
        collectives.in_rounds(codec, INT8)


@pytest.mark.parametrize("bad", [codecs.int8(), None, collectives.two_shot])
def test_rounds_need_an_algorithm(bad):
    with pytest.raises(ValueError, match="`all_reduce` must be an algorithm such as"):
        collectives.in_rounds(POWER, bad)
