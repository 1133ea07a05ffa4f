"""Tests how the loss function is called, and what it must return."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import pipejax as pj
from pipejax._core.step._loss import full_form

from ...helpers import init_params, loss_fn
from ...train_step.refusals import BATCH, make, refused


def returning(make_loss, message, **init):
    """Checks a loss function that breaks its contract, also with microbatches."""
    for settings in ({"width": 1}, {"microbatches": 2}):
        train = make(lambda p, b, **kw: make_loss(loss_fn(p, b)), **settings)
        with refused(message):
            train.step(train.init(init_params(), **init), BATCH)


def test_vector_loss_is_refused():
    returning(
        lambda loss: jnp.stack([loss, loss]),
        r"`loss_fn` must return a scalar, got an array of shape \(2,\). Average",
    )


def test_integer_loss_is_refused():
    returning(
        lambda loss: loss.astype(jnp.int32),
        r"`loss_fn` must return a floating scalar, got int32. Only a real loss",
    )


@pytest.mark.parametrize("out", [None, "loss", {"loss": 1}, 0, (1.0, 2.0, 3.0)])
def test_loss_other_than_an_array_is_refused(out):
    name = type(out).__name__
    returning(lambda loss: out, rf"`loss_fn` must return a scalar, or .* got {name}\.")


@pytest.mark.parametrize("width", [1, 2])
def test_metrics_other_than_real_scalars_are_refused(width):
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
    with refused(r"metrics that are numbers, .* `metrics\['logits'\]` of type str"):
        step("low")


def test_loss_over_an_axis_outside_the_mesh_is_refused():
    train = make(lambda params, batch: lax.pmean(loss_fn(params, batch), "model"))
    state = train.init(init_params())
    with refused("`loss_fn` must use axes of the mesh only: .* axis name: model"):
        train.step(state, BATCH)


@pytest.mark.parametrize("aux", [{"accuracy": 1.0}, None, 1.0])
def test_second_result_other_than_aux_is_refused(aux):
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
def test_model_state_of_another_form_is_refused(given, returned):
    returning(
        lambda loss: (loss, pj.Aux(model_state=returned)),
        r"`loss_fn` must return the model state in the structure and shapes that"
        r" `train.init` was given: .*, got .*call `train.init\(params, model_state=",
        model_state=given,
    )


@pytest.mark.parametrize("weight", [jnp.ones(2), 1j, True])
def test_weights_other_than_real_scalars_are_refused(weight):
    train = make(lambda params, batch: (0.0, pj.Aux(weight=weight)))
    with refused("must return a weight that is a real scalar"):
        train.init(init_params(), batch=BATCH)


def test_weight_in_a_narrow_dtype_is_refused():
    """A mask of floating numbers is cast like all inputs; bfloat16 has 8 bits."""

    def loss(params, batch):
        weight = batch["mask"].sum()
        return params.mean(), pj.Aux(weight=weight)

    def begun(mask):
        train = make(loss, tx=optax.sgd(0.1), compute_dtype=jnp.bfloat16)
        return train.init(np.zeros(2, np.float32), batch={"mask": mask})

    with refused("must return a weight of float32, float64 or an integer dtype, beca"):
        begun(np.ones(16, np.float32))
    assert begun(np.ones(16, bool)).in_flight.pending[0].weight.dtype == np.float32


@pytest.mark.parametrize(
    ("weight", "wanted"), [(3, 3), (0.5, 0.5), (0, 0), (-1, np.nan), (np.nan, np.nan)]
)
def test_negative_weight_becomes_nan(weight, wanted):
    full = full_form(lambda params, batch: (1.0, pj.Aux(weight=weight)), None)
    _, returned = full(None, None, None, None)
    np.testing.assert_array_equal(returned.weight, np.float32(wanted), strict=True)


def test_keywords_are_passed_only_if_given():
    passed = []

    def loss(params, batch, **keywords):
        passed.append(keywords)
        return params, pj.Aux(model_state=keywords.get("model_state"))

    key, full = jax.random.key(0), full_form(loss, None)
    for given in ((None, None), (np.float32(3), None), (None, key)):
        full(jnp.float32(1), None, *given)
    assert passed == [{}, {"model_state": 3}, {"rng": key}]


def test_leaves_returned_unchanged_are_noted():
    def loss(params, batch, *, model_state):
        after = model_state | {"copy": 1 * model_state["copy"]}
        return params, pj.Aux(model_state=after)

    model_state = {"copy": jnp.ones(2), "mask": jnp.array([-jnp.inf])}
    _, returned = full_form(loss, None)(jnp.float32(1), None, model_state, None)
    assert returned.unchanged == (False, True)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_loss_may_write_into_the_model_state(microbatches):
    """The loss puts new leaves into the dict that it is passed, and returns it."""

    def loss(params, batch, *, model_state):
        model_state["mean"] = model_state["mean"] + batch.mean()
        return params * batch.mean(), pj.Aux(model_state=model_state)

    train = make(loss, devices=4, tx=optax.sgd(0.1), width=2, microbatches=microbatches)
    state = train.init(np.float32(0), model_state={"mean": np.float32(0)})
    for batch in np.ones((3, 8), np.float32):
        state, _ = train.step(state, batch)
    drained, _ = train.drain(state)
    assert float(drained.model_state["mean"]) == 3 * microbatches


def test_model_state_keeps_its_dtype():
    def loss(params, batch, *, model_state):
        return params * batch.mean(), pj.Aux(model_state=model_state + 1.0)

    train = make(loss, devices=4, tx=optax.sgd(0.1), width=1)
    state = train.init(np.float32(0), model_state=jnp.bfloat16(0))
    state, _ = train.step(state, np.ones(4, np.float32))
    assert state.model_state.dtype == jnp.bfloat16
    assert float(state.model_state) == 1


def test_integers_of_a_batch_are_not_cast():
    def loss(params, batch):
        assert batch["label"].dtype == jnp.int32
        assert batch["x"].dtype == jnp.bfloat16
        assert params.dtype == jnp.bfloat16
        return params * batch["x"].mean()

    train = make(
        loss, devices=4, tx=optax.sgd(0.1), width=1, compute_dtype=jnp.bfloat16
    )
    batch = {"x": np.ones(4, np.float32), "label": np.arange(4, dtype=np.int32)}
    state, info = train.step(train.init(np.float32(1)), batch)
    assert state.params.dtype == np.float32
    assert info.loss.dtype == np.float32
