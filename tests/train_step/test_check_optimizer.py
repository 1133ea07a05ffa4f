"""Tests which optimizers are refused, with the rule and the remedy."""

import numpy as np
import optax
import pytest

import pipejax as pj

from ..helpers import init_params
from .refusals import BATCH, TX, make, refused


def test_tx_with_a_pipeline_of_its_own():
    tx = optax.chain(pj.pipelined_mean("data"), TX)
    params = init_params()
    for settings in ({}, {"opt_state": tx.init(params)}):
        with refused(r"`tx` must not hold pj.pipelined_mean, .* set `width`"):
            make(tx=tx).init(params, **settings)


def test_optimizers_that_cannot_be_delayed_or_averaged():
    with refused("`tx` must not hold optax.lookahead, whose parameters are pairs"):
        make(tx=optax.lookahead(TX, 5, 0.5)).init(init_params())
    lbfgs = make(tx=optax.chain(optax.clip(1.0), optax.lbfgs()))
    with refused("`tx` must need nothing but gradients, .* 'value_fn'.* optax.adamw"):
        lbfgs.step(lbfgs.init(init_params()), BATCH)
    sam = optax.chain(optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1)))
    with refused("`tx` must not hold optax.contrib.sam with weight_prediction=False"):
        make(tx=sam, weight_prediction=False).init(init_params())
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
def test_optimizers_that_need_more_than_a_mean_gradient(tx, message):
    with refused(f"`tx` must not hold optax.contrib.{message}"):
        make(tx=tx, width=1).init(init_params())


@pytest.mark.parametrize("width", [1, 2])
def test_optimizer_state_that_changes_its_structure(width):
    tx = optax.chain(TX, optax.monitor({"norm": optax.tree.norm}))
    train = make(tx=tx, width=width)
    message = (
        r"`tx` must keep the structure of its state, .* got"
        r" `opt_state\[1\].measurements\['norm'\]`, which is there after an"
        r" update alone. Use optax.snapshot"
    )
    with refused(message):
        train.step(train.init(init_params()), BATCH)


def test_an_optimizer_state_of_something_else():
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
