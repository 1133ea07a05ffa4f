"""Tests which optimizers are refused, with the rule and the remedy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pipejax as pj

from ...helpers import assert_bits_equal, init_params, loss_fn
from ...train_step.refusals import BATCH, TX, make, refused


def test_tx_with_a_pipeline_of_its_own_is_refused():
    tx = optax.chain(pj.pipelined_mean("data"), TX)
    params = init_params()
    for settings in ({}, {"opt_state": tx.init(params)}):
        with refused(r"`tx` must not hold pj.pipelined_mean, .* set `width`"):
            make(tx=tx).init(params, **settings)


def test_optimizers_unfit_for_a_delay_or_a_mean_are_refused():
    with refused("`tx` must not hold optax.lookahead, whose parameters are pairs"):
        make(tx=optax.lookahead(TX, 5, 0.5)).init(init_params())
    lbfgs = make(tx=optax.chain(optax.clip(1.0), optax.lbfgs()))
    with refused("`tx` must need nothing but gradients, .* 'value_fn'.* optax.adamw"):
        lbfgs.step(lbfgs.init(init_params()), BATCH)
    sam = optax.chain(optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1)))
    low_rank = {"at_once": pj.codecs.power_sgd(1, jax.random.key(0))}
    for plain in ({"weight_prediction": False}, low_rank):
        with refused("`tx` must not hold optax.contrib.sam where .* and `at_once`"):
            make(tx=sam, **plain).init(init_params())
    make(tx=sam, weight_prediction=False, width=1).init(init_params())


@pytest.mark.parametrize(
    ("tx", "message"),
    [
        (
            optax.contrib.differentially_private_aggregate(1.0, 1.0, key=0),
            "differentially_private_aggregate, which needs the gradient of every",
        ),
        (
            optax.contrib.sophia(0.1),
            "hutchinson_estimator_diag_hessian, .* Give .* a `hessian_diagonal_fn`",
        ),
        (
            optax.contrib.sam(TX, TX, opaque_mode=True),
            "sam with opaque_mode=True, .* Leave opaque_mode at False",
        ),
    ],
)
def test_optimizers_needing_more_than_a_mean_gradient_are_refused(tx, message):
    with refused(f"`tx` must not hold optax.contrib.{message}"):
        make(tx=tx, width=1).init(init_params())


@pytest.mark.parametrize("width", [1, 2])
def test_optimizer_changing_the_structure_of_its_state_is_refused(width):
    tx = optax.chain(TX, optax.monitor({"norm": optax.tree.norm}))
    train = make(tx=tx, width=width)
    message = (
        r"`tx` must keep the structure of its state, .* got"
        r" `opt_state\[1\].measurements\['norm'\]`, which is there after an"
        r" update alone. Use optax.snapshot"
    )
    with refused(message):
        train.step(train.init(init_params()), BATCH)


def transformation(state, update):
    """Returns an optimizer with this first state."""
    return optax.GradientTransformationExtraArgs(lambda params: state, update)


@pytest.mark.parametrize("width", [1, 2])
def test_optimizer_changing_the_dtype_of_its_state_is_refused(width):
    given = {
        r"`opt_state\['n'\]` is bfloat16\[\] before an update, got float32\[\] after": (
            lambda g, s, p=None, **_: (g, {"n": s["n"] + jnp.float32(1)})
        ),
        r"`opt_state\['n'\]` is bfloat16\[\] before an update, got bfloat16\[3\]": (
            lambda g, s, p=None, **_: (g, {"n": jnp.zeros(3, jnp.bfloat16)})
        ),
    }
    for message, update in given.items():
        tx = transformation({"n": jnp.zeros((), jnp.bfloat16)}, update)
        train = make(tx=tx, width=width)
        with refused(
            rf"`tx` must keep the shapes and dtypes of its state, .* {message}"
        ):
            train.step(train.init(init_params()), BATCH)


def test_optimizers_with_additional_arguments_are_refused():
    def by_keyword(updates, state, params=None, *, hessian, **_):
        return updates, state

    def by_position(updates, state, params, hessian):
        return updates, state

    def by_name(updates, state, params=None, **extra):
        return extra["hessian"], state

    for update in (by_keyword, by_position, by_name):
        train = make(tx=transformation((), update), width=1)
        message = (
            "`tx` must need nothing but gradients, state, parameters and the loss as"
            " `value`; got an update that ends with .*'hessian'.* choose an optimizer"
        )
        with refused(message):
            train.step(train.init(init_params()), BATCH)


def test_error_of_the_optimizer_is_not_hidden():
    def fails(updates, state, params=None, **_):
        raise TypeError("unsupported operand")

    train = make(tx=transformation((), fails), width=1)
    with pytest.raises(TypeError, match="unsupported operand"):
        train.step(train.init(init_params()), BATCH)


def test_state_continues_with_other_static_objects():
    """The structures differ in a function only, and the functions of the new model."""

    @jax.tree_util.register_pytree_node_class
    class Model:
        def __init__(self, params, act):
            self.params, self.act = params, act

        def tree_flatten(self):
            return (self.params,), self.act

        @classmethod
        def tree_unflatten(cls, act, children):
            return cls(*children, act)

    train = make(lambda model, batch: model.act(loss_fn(model.params, batch)))
    state = train.init(Model(init_params(), lambda x: x))
    for _ in range(3):
        state, _ = train.step(state, BATCH)
    state, _ = train.drain(state)
    again = train.init(
        Model(state.params.params, lambda x: 1 * x), opt_state=state.opt_state
    )
    assert_bits_equal(
        jax.tree.leaves(again.opt_state), jax.tree.leaves(state.opt_state)
    )
    again, _ = train.step(again, BATCH)


def test_optimizer_state_of_another_optimizer_is_refused():
    params, other = init_params(), init_params() | {"out": np.zeros((7, 4), np.float32)}
    momentum = optax.sgd(0.1, momentum=0.9)
    half = optax.adamw(1e-2, mu_dtype="bfloat16")
    given = [
        (r"`opt_state\[0\]\.count` int32\[\]; got nothing", momentum.init(params)),
        (r"`opt_state\[0\]\.count` int32\[\]; got nothing", {"momentum": "none"}),
        (
            r"`opt_state\[0\]\.mu\['out'\]` float32\[7, 3\]; got float32\[7, 4\]",
            TX.init(other),
        ),
        (
            r"`opt_state\[0\]\.mu\['bias'\]` float32\[7\]; got bfloat16\[7\]",
            half.init(params),
        ),
        (r"`opt_state` tuple\[Scale.*; got list\[", list(TX.init(params))),
    ]
    rule = r"`opt_state` must be a state of this train step's `tx` for these .*: "
    for message, opt_state in given:
        with refused(rule + message + r".* in its place\. Make the train step with"):
            make().init(params, opt_state=opt_state)
