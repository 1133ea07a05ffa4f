"""Tests every rule of the collectives by the message of the error."""

import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax import codecs, collectives
from pipejax._internal.mesh import on_mesh
from pipejax.collectives import Layout

from ..grid import grid
from ..helpers import batches, init_params, loss_fn
from .cases import ALGORITHMS, KEY

HOSTS = ("host", "device")


def refused(message):
    return pytest.raises(ValueError, match=message)


def stages(all_reduce, layout, devices=3, axis="data", hosts=None):
    """Makes stages inside `shard_map`, as is required."""
    mesh = pj.data_mesh(devices, axis_name=axis, hosts=hosts)

    def local():
        all_reduce(layout, axis)
        return jnp.zeros(1)

    return jax.eval_shape(on_mesh(local, mesh, (), P(axis)))


@pytest.mark.parametrize("bad", ["int8", 8, codecs.int8, jnp.int8])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_codec_of_another_type_is_refused(algorithm, bad):
    message = r"`codec` must be a codec such as pj\.codecs\.int8\(\), or None .* got "
    with refused(message):
        ALGORITHMS[algorithm](bad)


@pytest.mark.parametrize(
    "codec", [codecs.int8(), codecs.bf16(), codecs.error_feedback(codecs.sign())]
)
def test_psum_refuses_codecs_without_linearity(codec):
    with refused(r"`codec` must be linear under psum.*acp_sgd or random_k; got .*"):
        collectives.psum(codec)


@pytest.mark.parametrize("codec", [codecs.sign(), codecs.top_k(3), codecs.truncate()])
def test_biased_codec_without_feedback_warns(codec):
    message = r"is biased: .* Use pj\.codecs\.error_feedback\(codec\)"
    with pytest.warns(UserWarning, match=message) as caught:
        collectives.two_shot(codec)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        collectives.two_shot(codecs.error_feedback(codec))
        collectives.two_shot(codecs.int8())


def test_psum_warns_of_a_biased_codec():
    with pytest.warns(UserWarning, match=r"PowerSGD is biased: .*error_feedback"):
        collectives.psum(codecs.power_sgd(1, KEY))


@pytest.mark.parametrize("algorithm", ["ring", "two_shot", "halving_doubling"])
def test_power_sgd_is_refused_by_algorithms_cutting_vectors(algorithm):
    make = ALGORITHMS[algorithm]
    all_reduce = make(codecs.error_feedback(codecs.power_sgd(1, KEY)))
    layout = Layout.of_shapes(((8, 12),))
    message = r"`power_sgd` must .* that does not cut vectors: pj\.collectives\.psum"
    with refused(message):
        stages(all_reduce, layout)


def test_k_above_the_size_of_a_piece_is_refused():
    """Each of 3 devices encodes 10 of 30 elements, so `k` can be at most 10."""
    all_reduce = collectives.two_shot(codecs.error_feedback(codecs.top_k(11)))
    with refused(r"`k` must be at most the 10 elements of which it chooses; got 11"):
        stages(all_reduce, Layout.of_shapes(((30,),)))


def test_unbound_axis_is_refused():
    for all_reduce in (collectives.psum(), collectives.ring()):
        with refused(r"`axis_name` must be an axis .* got 'data', .*jax\.shard_map"):
            all_reduce(Layout.of_shapes(((8,),)), "data")
    with refused(r"`axis_name` must be an axis .* got 'nodes', .* with the axis 'node"):
        layout = Layout.of_shapes(((8,),))
        stages(lambda layout, _: collectives.tree()(layout, "nodes"), layout)


# hierarchical

ONE_AXIS = r"`axis_name` must name 2 axes .* got 'data'.*pj\.data_mesh\(axis_name="


def test_hierarchical_over_one_axis_is_refused():
    with refused(ONE_AXIS):
        stages(collectives.hierarchical(), Layout.of_shapes(((8,),)))


def test_hierarchical_in_a_step_over_one_axis_is_refused():
    settings = {"mesh": pj.data_mesh(4), "all_reduce": collectives.hierarchical()}
    with refused(ONE_AXIS):
        pj.make_train_step(loss_fn, optax.sgd(0.1), **settings)
    with refused(ONE_AXIS):
        pj.pipelined_mean("data", all_reduce=collectives.hierarchical())


def test_hierarchical_inside_a_schedule_is_refused_over_one_axis():
    both = [collectives.psum(), collectives.hierarchical()]
    settings = {"mesh": pj.data_mesh(4), "all_reduce": collectives.scheduled(both, [1])}
    with refused(ONE_AXIS):
        pj.make_train_step(loss_fn, optax.sgd(0.1), **settings)


@pytest.mark.parametrize("inner", [collectives.psum(), collectives.tree(), "ring"])
def test_inner_algorithm_without_two_halves_is_refused(inner):
    with refused(r"`inner` must be a reduce-scatter and an all-gather: .*; got "):
        collectives.hierarchical(inner=inner)


@pytest.mark.parametrize("outer", [collectives.hierarchical(), collectives.ring, 3])
def test_outer_algorithm_must_run_over_one_axis(outer):
    with refused(r"`outer` must be an algorithm over one axis, got .*two_shot\("):
        collectives.hierarchical(outer=outer)


def test_inner_halving_doubling_of_three_devices_is_refused():
    all_reduce = collectives.hierarchical(inner=collectives.halving_doubling())
    message = r"`inner` must give every device .* a piece: .* got 3\. Choose two_shot"
    with refused(message):
        stages(all_reduce, Layout.of_shapes(((8,),)), devices=6, axis=HOSTS, hosts=2)


# scheduled


@pytest.mark.parametrize(
    ("count", "boundaries"),
    [
        (2, []),
        (1, [3]),
        (2, [0]),
        (2, [-1]),
        (3, [4, 4]),
        (3, [5, 4]),
        (0, []),
        (2, [1.5]),
        (2, [True]),
        (2, ["a"]),
    ],
)
def test_boundaries_must_increase_and_be_one_fewer(count, boundaries):
    message = r"`boundaries` must be positive and increasing integers, one fewer than"
    with refused(message):
        collectives.scheduled([collectives.psum()] * count, boundaries)


@pytest.mark.parametrize("bad", [collectives.psum, "psum", None])
def test_schedule_must_consist_of_algorithms(bad):
    with refused(
        r"`all_reduces` must be a list of algorithms such as pj\.collectives\.psum\(\)"
    ):
        collectives.scheduled([collectives.psum(), bad], [3])


def test_schedule_of_a_single_algorithm_is_refused():
    with refused(r"`all_reduces` must be a list of algorithms such .*, got Psum"):
        collectives.scheduled(collectives.psum(), [3])


def test_algorithm_factory_without_a_call_is_refused():
    message = r"`all_reduce` must be an algorithm such as .*psum\(\), called,.*got <fun"
    settings = {"mesh": pj.data_mesh(2), "all_reduce": collectives.two_shot}
    with refused(message):
        pj.make_train_step(loss_fn, optax.sgd(0.1), **settings)
    with refused(message):
        pj.pipelined_mean("data", all_reduce=collectives.two_shot)


def test_schedule_inside_a_program_is_refused():
    both = collectives.scheduled([collectives.psum(), collectives.two_shot()], [3])
    message = r"`all_reduce` must be one algorithm inside a program: .*make_train_step"
    with refused(message):
        pj.pipelined_mean("data", all_reduce=both)


@grid(
    1,
    now=["two_shot", "power_sgd"],
    before=["psum", "other block", "other algorithm"],
    executor=["fused", "host"],
)
def test_state_of_another_all_reduce_is_refused(before, now, executor):
    key = jax.random.key(0)
    feedback = pj.codecs.error_feedback
    made = {
        "psum": collectives.psum(),
        "other block": collectives.two_shot(feedback(pj.codecs.int4(64))),
        "other algorithm": collectives.ring(feedback(pj.codecs.int4(8))),
        "two_shot": collectives.two_shot(feedback(pj.codecs.int4(8))),
        "power_sgd": collectives.psum(feedback(pj.codecs.power_sgd(1, key))),
    }
    steps = [
        pj.make_train_step(
            loss_fn,
            optax.sgd(0.1),
            mesh=pj.data_mesh(4),
            all_reduce=made[name],
            executor=executor,
        )
        for name in (before, now)
    ]
    state = steps[0].init(init_params())
    message = r"`state` must (hold the arrays that the codec|be of a train step)"
    with pytest.raises(ValueError, match=message):
        steps[1].step(state, batches(1)[0])
