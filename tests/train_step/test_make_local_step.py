"""Tests that arguments of `make_local_step` are checked."""

import jax
import optax
import pytest

import pipejax as pj

from ..helpers import loss_fn

SCHEDULE = pj.collectives.scheduled(
    [pj.collectives.psum(), pj.collectives.two_shot()], [100]
)
LOW_RANK = pj.codecs.error_feedback(pj.codecs.power_sgd(2, jax.random.key(0)))
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sync_every": 0}, "`sync_every` must be an integer of at least 1"),
        ({"overlap_steps": -1}, "`overlap_steps` must be an integer of at least 0"),
        ({"sync_every": 2, "overlap_steps": 3}, "`overlap_steps` must be at most"),
        ({"sync_every": "auto", "overlap_steps": 3}, "or 'auto' without `overlap_st"),
        ({"sync_every": "some"}, "`sync_every` must be an integer, or 'auto'"),
        ({"axis_name": "host"}, "`mesh` must have the axis 'host'"),
        ({"outer_tx": 1.0}, "`outer_tx`"),
        ({"outer_tx": optax.contrib.muon(1.0)}, "`outer_tx` must work element by"),
        ({"outer_tx": CLIPPED}, "`outer_tx` must work element by"),
        ({"all_reduce": SCHEDULE}, "`all_reduce` must be one algorithm"),
        ({"all_reduce": pj.collectives.psum(LOW_RANK)}, "codec that compresses vec"),
        ({"all_reduce": pj.collectives.tree(LOW_RANK)}, "codec that compresses vec"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        pj.make_local_step(loss_fn, optax.sgd(0.1), mesh=pj.data_mesh(2), **settings)
