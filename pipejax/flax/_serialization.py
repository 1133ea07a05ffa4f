"""Lets Flax serialize a state: `flax.serialization.to_bytes(state)`.

Flax knows tuples and dicts. It is told here about the other classes in a state. As
always with Flax, `from_bytes(target, data)` takes the structure from a state that
`train.init` has made with the same arguments, and its arrays are NumPy arrays. The next
step places them. Flax reads whole arrays, which one of several processes does not have.
"""

import dataclasses

from flax import serialization

from pipejax._core.message import Passengers
from pipejax._core.rounds import Form
from pipejax._internal.shards import UNSHARDED, Shards
from pipejax._internal.types import Tree


def _values_of(passengers: Passengers) -> dict[str, Tree]:
    return {"values": passengers.values}


def _with_values(passengers: Passengers, found: dict[str, Tree]) -> Passengers:
    return dataclasses.replace(passengers, values=found["values"])


def _no_arrays_of(shards: Shards) -> dict[str, Tree]:
    if shards != UNSHARDED:
        raise ValueError(
            "`state` must have whole arrays on every device for Flax's serialization,"
            " which does not know where the shards of an array lie; got a state of a"
            " mesh with inner axes or of a sharded optimizer. Save it with"
            " `pipejax.checkpoint`."
        )
    return {}


def _nothing_of(form: Form) -> dict[str, Tree]:
    del form
    return {}


def _as_in_target(target: Tree, found: dict[str, Tree]) -> Tree:
    del found
    return target


serialization.register_serialization_state(Passengers, _values_of, _with_values)
serialization.register_serialization_state(Shards, _no_arrays_of, _as_in_target)
serialization.register_serialization_state(Form, _nothing_of, _as_in_target)
