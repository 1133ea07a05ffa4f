"""Tests that a local step refuses the states of other local steps."""

import functools

import optax
import pytest

import pipejax as pj
from pipejax import codecs, collectives

from ...helpers import batches, init_params, loss_fn

SETTINGS = {"mesh": pj.data_mesh(4), "sync_every": 3, "overlap_steps": 1}


def new(tx=None, **settings):
    return pj.make_local_step(loss_fn, tx or optax.adamw(1e-2), **SETTINGS | settings)


@functools.cache
def begun():
    train = new()
    state = train.init(init_params())
    for batch in batches(2):
        state, _ = train.step(state, batch)
    return state


MOMENTUM = optax.sgd(0.7, momentum=0.9)
INNER, OUTER = "state.local.trainable.opt_state", r"state.shared.outer\[0\]"


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            {"overlap_steps": 2},
            "`state` must be one of 2 chunks, as `overlap_steps` says; got one of 1",
        ),
        ({"mesh": pj.data_mesh(2)}, "`state` must be one of 2 groups; got one of 4"),
        ({"tx": MOMENTUM}, f"`{INNER}` must be .* `tx` .*; got nothing in its place"),
        (
            {"outer_tx": MOMENTUM},
            f"`{OUTER}` must be .* `outer_tx` .*; got nothing in its place",
        ),
    ],
)
def test_state_of_other_rounds_is_refused(other, message):
    another = new(**other)
    for call in (
        lambda: another.step(begun(), batches(1)[0]),
        lambda: another.drain(begun()),
    ):
        with pytest.raises(ValueError, match=f"{message}.* Drain it with"):
            call()


def test_residuals_of_another_codec_are_refused():
    """The residuals would be lost silently."""
    int8 = codecs.int8(8)
    kept = new(all_reduce=collectives.two_shot(codecs.error_feedback(int8)))
    another = new(all_reduce=collectives.two_shot(int8))
    state = kept.init(init_params())
    for call in (
        lambda: another.step(state, batches(1)[0]),
        lambda: another.drain(state),
    ):
        with pytest.raises(ValueError, match="codecs keep nothing; got one with"):
            call()
