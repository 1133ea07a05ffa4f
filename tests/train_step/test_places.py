"""Tests where the pieces of a sharded optimizer lie."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from pipejax.message import Message, Passengers
from pipejax.shards import Shards
from pipejax.train_step._places import Places, exact_specs, split_of

PARAMS = {"b": jnp.zeros(3), "w": jnp.zeros((8, 6))}


def places(shards, sizes):
    return Places.of(optax.adam(0.1), PARAMS, shards, "data", sizes)


def test_arrays_of_the_optimizer_lie_as_their_parameters():
    found = places(Shards(cuts=(None, 0)), {"data": 4, "other": 2})
    assert found.devices.names == ("data",)
    assert found.data == 4
    assert found.params == (P(), P("data"))
    assert found.params_inside == (P(), P())
    assert found.opt_state[0].mu == {"b": P(), "w": P("data")}
    assert found.opt_state_cuts == (None, None, 0, None, 0)
    assert found.piece(PARAMS["w"], P("data")).shape == (2, 6)
    assert jax.tree.structure(found.whole_opt_state) == jax.tree.structure(
        optax.adam(0.1).init(PARAMS)
    )


def test_groups_split_other_axes():
    inside = (P(), P(None, "fsdp"))
    shards = Shards(inside, cuts=(None, 0), inner=("fsdp",))
    found = places(shards, {"data": 4, "fsdp": 2})
    assert found.devices.names == ("data", "fsdp")
    assert found.params == (P(), P("data", "fsdp"))
    assert found.opt_state[0].nu["w"] == P("data", "fsdp")
    assert found.opt_state_inside[0].nu["w"] == P(None, "fsdp")
    assert found.piece(PARAMS["w"], found.params[1]).shape == (2, 3)


def test_splits_name_every_axis():
    form = jax.ShapeDtypeStruct((4, 2, 3), "float32")
    assert split_of(P(), form) == ((), (), ())
    assert split_of(P(None, "a"), form) == ((), ("a",), ())
    assert split_of(P(("a", "b")), form) == (("a", "b"), (), ())


def test_passengers_are_whole():
    message = Message(
        PARAMS,
        {"mean": jnp.zeros(4), "count": None},
        Passengers.of(jnp.zeros(()), None),
    )
    assert exact_specs(message) == (P(), P())
    shards = Shards((P(), P()), changes=(P("fsdp"),))
    assert exact_specs(message._replace(shards=shards)) == (P("fsdp"), P())
