"""Tests where the pieces of a sharded optimizer lie."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

from pipejax._core.message import Message, Passengers
from pipejax._core.step import Settings, Trainable
from pipejax._core.step._partition import (
    Partition,
    check_partition,
    exact_specs,
    spec_of,
    split_of,
)
from pipejax._internal.shards import Shards

PARAMS = {"b": jnp.zeros(3), "w": jnp.zeros((8, 6))}


def partition(shards, sizes):
    settings = Settings(None, optax.adam(0.1), "data")
    return Partition.of(settings, Trainable(PARAMS, None, shards=shards), sizes)


def test_optimizer_arrays_are_placed_like_their_parameters():
    found = partition(Shards(data_axes=(None, 0)), {"data": 4, "other": 2})
    assert found.devices.names == ("data",)
    assert found.data == 4
    assert found.params == (P(), P("data"))
    assert found.params_inner == (P(), P())
    assert found.opt_state[0].mu == {"b": P(), "w": P("data")}
    assert found.opt_state_axes == (None, None, 0, None, 0)
    assert found.piece(PARAMS["w"], P("data")).shape == (2, 6)
    assert jax.tree.structure(found.whole_opt_state) == jax.tree.structure(
        optax.adam(0.1).init(PARAMS)
    )


def test_groups_split_other_axes():
    inner = (P(), P(None, "fsdp"))
    shards = Shards(inner, data_axes=(None, 0), inner=("fsdp",))
    found = partition(shards, {"data": 4, "fsdp": 2})
    assert found.devices.names == ("data", "fsdp")
    assert found.params == (P(), P("data", "fsdp"))
    assert found.opt_state[0].nu["w"] == P("data", "fsdp")
    assert found.opt_state_inner[0].nu["w"] == P(None, "fsdp")
    assert found.piece(PARAMS["w"], found.params[1]).shape == (2, 3)


def test_splits_name_every_axis():
    for spec, split in (
        (P(), ((), (), ())),
        (P(None, "a"), ((), ("a",), ())),
        (P(("a", "b")), (("a", "b"), (), ())),
    ):
        assert split_of(spec, 3) == split
        assert spec_of(split) == spec


def test_result_in_the_same_place_keeps_its_spec():
    found = partition(Shards(data_axes=(None, 0)), {"data": 4})
    assert found.kept(P("data"), (("data",), ())) == P("data")
    assert found.kept(P(), ((), ("data",))) == P(None, "data")
    alone = partition(Shards(data_axes=(None, 0)), {"data": 1})
    assert alone.kept(P("data"), ((), ())) == P("data")


def test_specs_of_a_state_take_precedence():
    specs = (P(), P("data"), P("data"), P(), P(None, "data"))
    shards = Shards(data_axes=(None, 0), opt_state=specs)
    found = partition(shards, {"data": 4})
    assert tuple(jax.tree.leaves(found.opt_state)) == specs
    assert found.opt_state_axes == (None, 0, 0, None, 1)
    after = (P(), P(), *specs[2:])
    with pytest.raises(ValueError, match=r"`opt_state\[0\].mu\['b'\]` split as"):
        check_partition(after, found)


def test_passengers_are_not_split():
    message = Message(
        PARAMS,
        {"mean": jnp.zeros(4), "count": None},
        Passengers.of(jnp.zeros(()), None),
    )
    assert exact_specs(message) == (P(), P())
    shards = Shards((P(), P()), changes=(P("fsdp"),))
    assert exact_specs(message._replace(shards=shards)) == (P("fsdp"), P())
