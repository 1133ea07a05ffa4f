"""Trains a program with pipejax."""

from collections.abc import Callable
from typing import Any

import jax

import pipejax as pj
import pipejax.flax.nnx

from ._client import Client, Program, program_of
from ._pieces import DEVICES
from ._twins import History


class Ours:
    """A train step of pipejax, and its state."""

    def __init__(self, client: Client, **settings: Any):
        loss_fn, params, model_state = _given(client)
        mesh = pj.data_mesh(DEVICES)
        self._train = pj.make_train_step(
            loss_fn, client.tx, mesh=mesh, **client.settings, **settings
        )
        self._state = self._train.init(
            params,
            model_state=model_state,
            rng=client.rng,
            batch=client.batches[0],
            shared=client.shared,
        )
        self._params: list[Any] = []
        self._infos: list[pj.StepInfo] = []

    @property
    def params(self) -> Any:
        """Returns copies of the parameters after the last step."""
        return self._train.whole_params(self._state)

    def step(self, batch: Any, shared: Any = None) -> None:
        """Trains on a batch."""
        self._state, info = self._train.step(self._state, batch, shared)
        self._params.append(self.params)
        self._infos.append(info)

    def finish(self) -> History:
        """Drains the pipeline."""
        if self._train.width > 1:
            self._state, drained = self._train.drain(self._state)
            self._params.append(self.params)
            self._infos.extend(drained)
        reported = [(info.loss, info.metrics) for info in self._infos if info.arrived]
        return jax.device_get(History(self._params, reported, self._state.model_state))


def run(program: Client | Program, **settings: Any) -> list[History]:
    """Trains with `pj.make_train_step`, and drains the pipelines.

    Args:
      program: The program, or the client, to train.
      **settings: The width and the weight prediction of the train steps.

    Returns:
      The history of every client.
    """
    program = program_of(program)
    trainers = [Ours(client, **settings) for client in program.clients]
    program.loop(*trainers)
    return [trainer.finish() for trainer in trainers]


def _given(client: Client) -> tuple[Callable[..., Any], Any, Any]:
    """Returns the loss function, the parameters and the model state for pipejax."""
    if client.nnx:
        return pj.flax.nnx.split(*client.nnx)

    def loss_fn(params: Any, batch: Any, **given: Any) -> Any:
        loss, extra = client.loss(params, batch, **given)
        return loss, pj.Aux(**extra._asdict())

    return loss_fn, client.params, client.model_state
