"""What a loss function returns: the rule, the value, the remedy."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pipejax as pj

from ..helpers import init_params, loss_fn
from .refusals import BATCH, make, refused


def returning(make_loss, message, **init):
    """A loss function that breaks its contract, at every width and way of working."""
    for settings in ({"width": 1}, {"microbatches": 2}):
        train = make(lambda p, b, **kw: make_loss(loss_fn(p, b)), **settings)
        with refused(message):
            train.step(train.init(init_params(), **init), BATCH)


def test_loss_that_is_a_vector():
    returning(
        lambda loss: jnp.stack([loss, loss]),
        r"`loss_fn` must return a scalar, got an array of shape \(2,\). Average",
    )


def test_loss_that_is_an_integer():
    returning(
        lambda loss: loss.astype(jnp.int32),
        r"`loss_fn` must return a floating scalar, got int32. Only a real loss",
    )


@pytest.mark.parametrize("out", [None, "loss", {"loss": 1}, 0, (1.0, 2.0, 3.0)])
def test_loss_that_is_no_array(out):
    name = type(out).__name__
    returning(lambda loss: out, rf"`loss_fn` must return a scalar, or .* got {name}\.")


@pytest.mark.parametrize("width", [1, 2])
def test_metrics_that_are_no_real_scalars(width):
    def step(metric):
        train = make(
            lambda p, b: (loss_fn(p, b), pj.Aux(metrics={"logits": metric})),
            width=width,
        )
        train.step(train.init(init_params(), batch=BATCH), BATCH)

    with refused(r"metrics that are scalars, .* `metrics\['logits'\]` of shape \(3,\)"):
        step(jnp.ones(3))
    with refused(r"real metrics, got `metrics\['logits'\]` of dtype complex64"):
        step(jnp.complex64(1j))


def test_loss_over_an_axis_that_the_mesh_does_not_have():
    train = make(lambda params, batch: lax.pmean(loss_fn(params, batch), "model"))
    state = train.init(init_params())
    with refused("`loss_fn` must use axes of the mesh only: .* axis name: model"):
        train.step(state, BATCH)


@pytest.mark.parametrize("aux", [{"accuracy": 1.0}, None, 1.0])
def test_aux_that_is_something_else(aux):
    returning(
        lambda loss: (loss, aux),
        rf"pj.Aux\(metrics=...,.*got {type(aux).__name__} in second place",
    )


@pytest.mark.parametrize(
    ("given", "returned"),
    [
        ({"mean": np.zeros(3, np.float32)}, None),
        (None, {"mean": np.zeros(3, np.float32)}),
        ({"mean": np.zeros(3, np.float32)}, {"var": np.zeros(3, np.float32)}),
        ({"mean": np.zeros(3, np.float32)}, {"mean": np.float32(0)}),
        ({"mean": np.zeros(3, np.float32)}, {"mean": np.zeros((3, 1), np.float32)}),
    ],
)
def test_model_state_of_another_form(given, returned):
    returning(
        lambda loss: (loss, pj.Aux(model_state=returned)),
        r"`loss_fn` must return the model state in the structure and shapes that"
        r" `train.init` was given: .*, got .*call `train.init\(params, model_state=",
        model_state=given,
    )
