"""Trains a client with pipejax."""

from collections.abc import Callable
from typing import Any

import jax

import pipejax as pj
import pipejax.flax.nnx

from ._client import Client
from ._pieces import DEVICES
from ._twins import History


def run(client: Client, **settings: Any) -> History:
    """Trains a client with `pj.make_train_step`, and drains the pipeline.

    Args:
      client: The client to train.
      **settings: The width and the weight prediction of the train step.
    """
    loss_fn, params, model_state = _given(client)
    train = pj.make_train_step(
        loss_fn, client.tx, mesh=pj.data_mesh(DEVICES), **client.settings, **settings
    )
    state = train.init(
        params, model_state=model_state, rng=client.rng, batch=client.batches[0]
    )
    history, infos = [], []
    for batch in client.batches:
        state, info = train.step(state, batch)
        history.append(state.params)
        infos.append(info)
    if train.width > 1:
        state, drained = train.drain(state)
        history.append(state.params)
        infos.extend(drained)
    reported = [(info.loss, info.metrics) for info in infos if info.arrived]
    return jax.device_get(History(history, reported, state.model_state))


def _given(client: Client) -> tuple[Callable[..., Any], Any, Any]:
    """Returns the loss function, the parameters and the model state for pipejax."""
    if client.nnx:
        return pj.flax.nnx.split(*client.nnx)

    def loss_fn(params: Any, batch: Any, **given: Any) -> Any:
        loss, extra = client.loss(params, batch, **given)
        return loss, pj.Aux(**extra._asdict())

    return loss_fn, client.params, client.model_state
