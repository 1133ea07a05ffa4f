"""Compares pipejax with the twin of a client."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import _ours, _rounding, _twins
from ._client import Client
from ._pieces import Inputs, Pieces, State, pieces_of
from ._twins import History


class Way(NamedTuple):
    """A way to train.

    Attributes:
      twin: The loop written by hand.
      settings: The arguments of `pj.make_train_step`.
    """

    twin: Callable[[Pieces, State, list[Inputs]], History]
    settings: dict[str, Any]


WAYS = {
    "width 1": Way(_twins.width_1, {"width": 1}),
    "width 2 plain": Way(
        _twins.width_2_plain, {"width": 2, "weight_prediction": False}
    ),
    "width 2 predicted": Way(
        _twins.width_2_predicted, {"width": 2, "weight_prediction": "own"}
    ),
}


def compared(
    client: Client, seed: int, ways: Iterable[str] = tuple(WAYS)
) -> dict[str, Any]:
    """Trains a client in every way, in pipejax and by hand.

    Args:
      client: The client to train.
      seed: The seed of the twin's disturbances.
      ways: Names of `WAYS`.

    Returns:
      A dict for every way. It has the largest `difference` of pipejax from the twin and
      its `bound`, each for `params`, for `reported`, which is loss and metrics, and for
      `model_state` if there is one. `apart` is the largest distance, update by update,
      of the twin's parameters from those of the nearest twin of another way. A bound
      far below `apart` tells the ways apart. If pipejax refuses the client, the dict
      has only the error message, `refused`.

    Raises:
      AssertionError: If pipejax does not refuse a client that it should refuse, or if
        the error message is another.
    """
    refused = {
        way: {"refused": refusal(client, way)} for way in ways if way in client.refused
    }
    ways = [way for way in ways if way not in refused]
    pieces = pieces_of(client)
    start, steps = _start(client), _inputs(client)

    def twin(way: str, pieces: Pieces) -> History:
        return WAYS[way].twin(pieces, start, steps)

    def disturbed(way: str, run: int) -> History:
        rng = np.random.default_rng((seed, run))
        return twin(way, _rounding.disturbed(pieces, client.terms, rng))

    twins = {way: twin(way, pieces) for way in ways}
    found = {
        way: _differences(
            twins[way],
            _ours.run(client, **WAYS[way].settings),
            [disturbed(way, run) for run in range(_rounding.RUNS)],
        )
        | _apart(way, twins)
        for way in ways
    }
    return {way: (found | refused)[way] for way in (*ways, *refused)}


def refusal(client: Client, way: str) -> str:
    """Returns the error message with which pipejax refuses a client.

    Raises:
      AssertionError: If pipejax does not refuse the client, or if the error message is
        another.
    """
    try:
        _ours.run(client, **WAYS[way].settings)
    except ValueError as error:
        said = str(error).splitlines()[0]  # JAX appends lines
        assert client.refused[way] in said, said
        return said
    raise AssertionError(f"{way} must be refused: {client.refused[way]}")


def within(row: dict[str, Any]) -> bool:
    """Returns whether every difference of one way is at most its bound."""
    return all(
        part["difference"] <= part["bound"]
        for part in row.values()
        if isinstance(part, dict)
    )


def _start(client: Client) -> State:
    params, model_state = jax.tree.map(jnp.asarray, (client.params, client.model_state))
    opt_state = jax.tree.map(jnp.asarray, client.tx.init(params))
    return State(params, opt_state, model_state)


def _inputs(client: Client) -> list[Inputs]:
    """Returns the inputs of every step, with a key that is split from the client's."""
    found, rng = [], client.rng
    for batch in client.batches:
        key = None
        if rng is not None:
            rng, key = jax.random.split(rng)
        found.append(Inputs(batch, key))
    return found


def _differences(
    twin: History, ours: History, disturbed: list[History]
) -> dict[str, Any]:
    parts = [name for name in History._fields if jax.tree.leaves(getattr(twin, name))]

    def distance(run: History, part: str) -> float:
        return _rounding.distance(getattr(run, part), getattr(twin, part))

    return {
        part: {
            "difference": distance(ours, part),
            "bound": max(distance(run, part) for run in disturbed),
        }
        for part in parts
    }


def _apart(way: str, twins: dict[str, History]) -> dict[str, float]:
    def updated(history: History) -> list[Any]:
        # The first step of a pipeline of width 2 applies no update.
        return history.params[-len(history.reported) :]

    mine = updated(twins[way])
    others = [
        _rounding.distance(mine, updated(twin))
        for other, twin in twins.items()
        if other != way
    ]
    return {"apart": min(others)} if others else {}
