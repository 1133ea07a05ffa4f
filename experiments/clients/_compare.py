"""Compares pipejax with the twin of a client."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import _ours, _rounding, _twins
from ._client import Client, Program, program_of
from ._pieces import Pieces, State, pieces_of
from ._twins import Compute, History, Twin


class Way(NamedTuple):
    """A way to train.

    Attributes:
      compute: Computes the gradients of the loop written by hand.
      settings: The arguments of `pj.make_train_step`.
    """

    compute: Compute
    settings: dict[str, Any]


WAYS = {
    "width 1": Way(_twins.at_params, {"width": 1}),
    "width 2 plain": Way(_twins.at_params, {"width": 2, "weight_prediction": False}),
    "width 2 predicted": Way(
        _twins.at_predictions, {"width": 2, "weight_prediction": "own"}
    ),
}


def compared(
    program: Client | Program, seed: int, ways: Iterable[str] = tuple(WAYS)
) -> dict[str, Any]:
    """Trains a program in every way, in pipejax and by hand.

    Args:
      program: The program, or the client, to train.
      seed: The seed of the twin's disturbances.
      ways: Names of `WAYS`.

    Returns:
      A dict for every way. It has the largest `difference` of pipejax from the twin and
      its `bound`, each for `params`, for `reported`, which is loss and metrics, and for
      `model_state` if there is one. `apart` is the largest distance, update by update,
      of the twin's parameters from those of the nearest twin of another way. A bound
      far below `apart` tells the ways apart. If pipejax refuses a client, the dict has
      only the error message, `refused`.

    Raises:
      AssertionError: If pipejax does not refuse a client that it should refuse, or if
        the error message is another.
    """
    program = program_of(program)
    refused = {
        way: {"refused": refusal(program, way)}
        for way in ways
        if way in program.refused
    }
    ways = [way for way in ways if way not in refused]
    clients = program.clients
    pieces = [pieces_of(client) for client in clients]

    def twin(way: str, pieces: list[Pieces]) -> list[History]:
        twins = [_twin(way, *each) for each in zip(clients, pieces, strict=True)]
        program.loop(*twins)
        return [each.finish() for each in twins]

    def disturbed(way: str, run: int) -> list[History]:
        rng = np.random.default_rng((seed, run))
        pairs = zip(clients, pieces, strict=True)
        return twin(way, [_rounding.disturbed(each, c.terms, rng) for c, each in pairs])

    twins = {way: twin(way, pieces) for way in ways}
    found = {
        way: _differences(
            twins[way],
            _ours.run(program, **WAYS[way].settings),
            [disturbed(way, run) for run in range(_rounding.RUNS)],
        )
        | _apart(way, twins)
        for way in ways
    }
    return {way: (found | refused)[way] for way in (*ways, *refused)}


def refusal(program: Client | Program, way: str) -> str:
    """Returns the error message with which pipejax refuses a client.

    Raises:
      AssertionError: If pipejax does not refuse the client, or if the error message is
        another.
    """
    wanted = program.refused[way]
    try:
        _ours.run(program, **WAYS[way].settings)
    except ValueError as error:
        said = str(error).splitlines()[0]  # JAX appends lines
        assert wanted in said, said
        return said
    raise AssertionError(f"{way} must be refused: {wanted}")


def within(row: dict[str, Any]) -> bool:
    """Returns whether every difference of one way is at most its bound."""
    return all(
        part["difference"] <= part["bound"]
        for part in row.values()
        if isinstance(part, dict)
    )


def _twin(way: str, client: Client, pieces: Pieces) -> Twin:
    params, model_state = jax.tree.map(jnp.asarray, (client.params, client.model_state))
    opt_state = jax.tree.map(jnp.asarray, client.tx.init(params))
    compute, settings = WAYS[way]
    return Twin(
        pieces,
        State(params, opt_state, model_state),
        client.rng,
        width=settings["width"],
        compute=compute,
    )


def _differences(
    twin: list[History], ours: list[History], disturbed: list[list[History]]
) -> dict[str, Any]:
    def of(run: list[History], part: str) -> list[Any]:
        return [getattr(history, part) for history in run]

    def distance(run: list[History], part: str) -> float:
        return _rounding.distance(of(run, part), of(twin, part))

    return {
        part: {
            "difference": distance(ours, part),
            "bound": max(distance(run, part) for run in disturbed),
        }
        for part in History._fields
        if jax.tree.leaves(of(twin, part))
    }


def _apart(way: str, twins: dict[str, list[History]]) -> dict[str, float]:
    def updated(run: list[History]) -> list[Any]:
        # The first step of a pipeline of width 2 applies no update.
        return [each.params[-len(each.reported) :] for each in run]

    mine = updated(twins[way])
    others = [
        _rounding.distance(mine, updated(twin))
        for other, twin in twins.items()
        if other != way
    ]
    return {"apart": min(others)} if others else {}
