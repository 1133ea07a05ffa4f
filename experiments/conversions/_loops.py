"""The loops that most programs share: gradients that come one step late, and pipejax.

A program whose steps depend on one another, such as one with two players, has loops of
its own.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

import pipejax as pj

from ._program import History

DEVICES = 4


def first(replicated: Any) -> Any:
    """Returns the arrays of the first device of a `pmap`, once all have made theirs.

    CPU devices share one pool of threads, so two programs must not run at once.
    """
    every = jax.block_until_ready(replicated)
    return jax.tree.map(lambda x: np.asarray(x.addressable_data(0))[0], every)


def delayed(
    gradient: Callable[[Any, Any], tuple[Any, Any]],
    tx: optax.GradientTransformation,
    params: Any,
    inputs: Callable[[int, Any], Any],
    steps: int,
) -> History:
    """Trains by hand at width 2: applies the gradient of every step one step later.

    Args:
      gradient: From parameters and the inputs of a step to what is reported of it, and
        the mean gradient.
      tx: The optimizer of the program.
      params: The parameters at the start.
      inputs: From the number of a step and the parameters before it to its inputs.
      steps: The number of steps.
    """

    @jax.jit
    def update(params: Any, opt_state: Any, gradients: Any) -> tuple[Any, Any]:
        updates, opt_state = tx.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    state, waiting, history = (params, tx.init(params)), None, History([], [])
    for i in range(steps):
        reported, fresh = gradient(state[0], inputs(i, state[0]))
        if waiting is not None:
            state = update(*state, waiting)
        waiting = fresh
        history.params.append(state[0])
        history.reported.append(reported)
    state = update(*state, waiting)
    history.params.append(state[0])
    return history


def converted(
    train: pj.TrainStep,
    state: pj.PipelineState,
    inputs: Callable[[int, Any], tuple[Any, Any]],
    steps: int,
    report: Callable[[pj.StepInfo], Any] = lambda info: (info.loss, info.metrics),
) -> History:
    """Trains with pipejax, and drains the pipeline.

    Args:
      train: The train step.
      state: What `train.init` returned.
      inputs: From the number of a step and the parameters before it to the batch and
        what the loss gets as `shared`.
      steps: The number of steps.
      report: From the info of a step to what is compared.
    """
    history, infos = [], []
    for i in range(steps):
        batch, shared = inputs(i, state.params)
        state, info = train.step(state, batch, shared=shared)
        history.append(state.params)
        infos.append(info)
    if train.width > 1:
        state, last = train.drain(state)
        history.append(state.params)
        infos += last
    return History(history, [report(info) for info in infos if info.arrived])


def train_step(loss_fn: Any, tx: Any, width: int, **settings: Any) -> pj.TrainStep:
    """Makes a train step whose gradients are delayed and no more.

    It runs on all devices, each with a copy of the model, unless a mesh is given.
    """
    settings = {"mesh": pj.data_mesh(DEVICES), **settings}
    return pj.make_train_step(
        loss_fn, tx, width=width, weight_prediction=False, **settings
    )
