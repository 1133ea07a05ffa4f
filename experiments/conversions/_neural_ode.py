"""Diffrax' neural ODE: an Equinox model, and time series that grow."""

import functools
import pathlib
from typing import Any
from unittest import mock

import diffrax
import equinox as eqx
import jax
import numpy as np
import optax

from . import _loops
from ._program import Conversion, History, Program
from ._sources import function, notebook

FOLDER = "diffrax"
CONVERSION = Conversion(
    changed=(
        "import pipejax",
        "make_step becomes a loss: `params, batch, *, shared`, with times in `shared`",
        "the loss combines the model",
        "the model solves with diffrax.DirectAdjoint()",
        "eqx.partition of the model",
        "make_train_step",
        "train.init in place of `optim.init`",
        "train.step",
        "train.drain at the end of each part of the loop",
        "eqx.combine at the end",
    ),
    around=("prints `info.loss`",),
    dropped=("Diffrax' default adjoint: Equinox refuses its loop within shard_map",),
)


def program(sources: pathlib.Path, steps: int, seed: int) -> Program:
    """Makes the program, with a small network; half of the steps see a short series."""
    path = sources / FOLDER / "docs" / "examples" / "neural_ode.ipynb"
    source, made = notebook(path, ("matplotlib", "matplotlib.pyplot"))
    keys = jax.random.split(jax.random.PRNGKey(seed), 3)
    times, series = made.get_data(64, key=keys[0])
    model = made.NeuralODE(2, 8, 1, key=keys[1])
    params, static = eqx.partition(model, eqx.is_inexact_array)
    tx = optax.adabelief(3e-3)
    lengths = [10] * (steps // 2) + [20] * (steps - steps // 2)
    loader = made.dataloader((series,), 8, key=keys[2])
    inputs = [
        (times[:length], np.asarray(each[:, :length]))
        for length, (each,) in zip(lengths, loader, strict=False)
    ]
    grad_loss = function(source, "grad_loss", vars(made))
    names = {
        **vars(made),
        "optim": tx,
        "grad_loss": eqx.filter_value_and_grad(grad_loss),
    }
    make_step = eqx.filter_jit(function(source, "make_step", names))

    def original(params: Any) -> History:
        model, opt_state = eqx.combine(params, static), tx.init(params)
        history = History([], [])
        for each in inputs:
            loss, model, opt_state = make_step(*each, model, opt_state)
            history.params.append(eqx.filter(model, eqx.is_inexact_array))
            history.reported.append((loss, None))
        return history

    @jax.jit
    @jax.value_and_grad
    def value_and_grad(params: Any, times: Any, series: Any) -> Any:
        return grad_loss(eqx.combine(params, static), times, series)

    def gradient(params: Any, each: Any) -> Any:
        loss, gradients = value_and_grad(params, *each)
        return (loss, None), gradients

    def delayed(params: Any) -> History:
        return _loops.delayed(gradient, tx, params, lambda i, _: inputs[i], steps)

    def loss_fn(params: Any, batch: Any, *, shared: Any) -> Any:
        # Within `shard_map`, Equinox refuses the loop of Diffrax' default adjoint.
        solve = functools.partial(diffrax.diffeqsolve, adjoint=diffrax.DirectAdjoint())
        with mock.patch.object(diffrax, "diffeqsolve", solve):
            return grad_loss(eqx.combine(params, static), shared, batch)

    def converted(params: Any, width: int) -> History:
        step = _loops.train_step(loss_fn, tx, width)
        return _loops.converted(
            step, step.init(params), lambda i, _: inputs[i][::-1], steps
        )

    return Program(
        params=params,
        original=original,
        delayed=delayed,
        converted=converted,
    )
