"""Tests how the states of codecs lie on meshes of several shapes."""

import jax
import jax.numpy as jnp
import optax
import pytest

import pipejax as pj
from pipejax import codecs, collectives
from pipejax._core.executors import codec_states
from pipejax._core.executors._codec_states import codec_states_of
from pipejax._core.message import Message

from ...helpers import batches, init_params, loss_fn
from .test_config import MESHES, Numbered, config_on

LIKE = Message({"w": jax.ShapeDtypeStruct((3,), jnp.float32)})


@pytest.mark.parametrize("name", MESHES)
def test_each_device_has_its_own_part(name):
    make, axis_name = MESHES[name]
    config = config_on(make(), axis_name, Numbered())
    states = codec_states_of(config, LIKE)
    assert states["place"].tolist() == [0, 1, 2, 3]
    assert states["place"].sharding.is_equivalent_to(config.data, 1)


def test_all_reduce_without_states_has_no_codec_states():
    assert codec_states_of(config_on(pj.data_mesh(4)), LIKE) == {}


def test_states_of_all_phases_are_there_from_the_start():
    """Every phase of a schedule finds its own states, and a warm-up adds none."""
    feedback = codecs.error_feedback(codecs.int8(8))
    rings = collectives.ring(feedback), collectives.two_shot(feedback)
    train = pj.make_train_step(
        loss_fn,
        optax.sgd(0.1),
        mesh=pj.data_mesh(4),
        warmup_steps=2,
        all_reduce=collectives.scheduled(rings, [5]),
    )
    state = train.init(init_params())
    each = [
        codec_states([phase], train.mesh, state, abstract=True)
        for phase in train.phases
    ]
    found = state.in_flight.codec_states
    assert len(each) == 3
    assert (
        found.keys() == each[0].keys() | each[2].keys() == each[1].keys() | found.keys()
    )
    abstract = train.abstract_state(init_params()).in_flight.codec_states
    shapes = [jax.tree.map(lambda x: (x.shape, x.dtype), x) for x in (abstract, found)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("executor", ["fused", "host"])
def test_state_with_residuals_of_another_codec_is_refused(executor):
    """The residuals would be lost silently."""

    def made(all_reduce):
        return pj.make_train_step(
            loss_fn,
            optax.sgd(0.1),
            mesh=pj.data_mesh(4),
            executor=executor,
            all_reduce=all_reduce,
        )

    kept = made(collectives.two_shot(codecs.error_feedback(codecs.int8(8))))
    plain = made(collectives.two_shot(codecs.int8(8)))
    first, second, third = batches(3)
    state, _ = kept.step(kept.init(init_params()), first)
    message = "codecs keep nothing; got one .* such as a residual, .* Drain it with"
    for call in (plain.step, lambda state, _: plain.drain(state)):
        with pytest.raises(ValueError, match=message):
            call(state, second)
    state, _ = kept.step(state, second)  # it is as it was
    state, _ = kept.drain(state)
    plain.step(plain.init(state.params, opt_state=state.opt_state), third)
