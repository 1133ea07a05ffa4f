"""Tests the state as one pytree, and the part that all devices share."""

import jax
import optax

import pipejax as pj
from pipejax._internal.shards import UNSHARDED
from pipejax.train_step._state import PipelineState, SharedState

from ..helpers import init_params, loss_fn

WHOLE = PipelineState(
    params="p",
    opt_state="o",
    model_state="m",
    in_flight="f",
    rng="r",
    skipped="s",
    step="t",
    calls="c",
)


def test_the_shared_part_leaves_out_two():
    """Each device has its own queue, and only the host counts calls."""
    found = SharedState.of(WHOLE)
    assert found._asdict() == {
        "params": "p",
        "opt_state": "o",
        "model_state": "m",
        "rng": "r",
        "skipped": "s",
        "step": "t",
        "shards": UNSHARDED,
        "gathered": None,
        "mean": None,
        "slopes": None,
    }


def test_the_whole_state_takes_the_new_two():
    whole = SharedState.of(WHOLE).with_in_flight("new", None)
    assert whole == WHOLE._replace(in_flight="new", calls=None)


def test_names_of_the_arrays_in_a_state():
    """A checkpoint finds the arrays by these names."""
    train = pj.make_train_step(loss_fn, optax.sgd(0.1), mesh=pj.data_mesh(2))
    paths = jax.tree_util.tree_leaves_with_path(train.init(init_params()))
    assert [jax.tree_util.keystr(path) for path, _ in paths] == [
        ".params['bias']",
        ".params['hidden']",
        ".params['out']",
        ".in_flight.pending[0].gradients['bias']",
        ".in_flight.pending[0].gradients['hidden']",
        ".in_flight.pending[0].gradients['out']",
        ".in_flight.pending[0].passengers.values",
        ".in_flight.filled",
        ".skipped",
        ".step",
    ]
