"""Tests that bytes and values of single processes are saved and restored in extras."""

import importlib.util

import jax
import pytest

from pipejax import checkpoint
from pipejax.checkpoint import PerProcess
from pipejax.checkpoint._extras import filled, packed, unpacked

from .helpers import init, train_step

EXTRAS = {"calls": 3, "data": b"\0\xff{", "list": [b"", {"deep": [b"x"]}]}


def written(extras):
    return filled(*packed(extras))


def test_bytes_come_back_from_json_unchanged():
    assert unpacked(written(EXTRAS)) == EXTRAS
    assert unpacked(written({})) == {}


def test_value_of_a_process_comes_back_beside_the_values_of_all():
    own = {"shard": 0, "state": b"\1"}
    found = unpacked(written({"data": [PerProcess(own), PerProcess(7)], "calls": 3}))
    assert found["calls"] == 3
    assert [x.value for x in found["data"]] == [own, 7]
    assert found["data"][0].saved == (own,)


def test_value_is_refused_on_another_number_of_processes(monkeypatch):
    found = unpacked(written({"data": PerProcess(b"a")}))["data"]
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    rule = r"as many processes as have saved it, got a checkpoint of 1 on 4\. Begin"
    with pytest.raises(ValueError, match=rule):
        _ = found.value
    assert found.saved == (b"a",)


@pytest.mark.parametrize("key", ["pipejax bytes", "pipejax per process"])
def test_marking_keys_are_refused(key):
    with pytest.raises(ValueError, match=rf"`extras\['a'\]` must not have .*'{key}'"):
        packed({"a": {key: 1}})


def test_value_inside_another_is_refused():
    with pytest.raises(ValueError, match=r"`extras\['a'\]\[0\]` must not be a PerPro"):
        packed({"a": PerProcess([PerProcess(1)])})


def test_other_values_are_refused_by_their_place():
    rule = r"`extras` must be a dict of values .*got `extras\['a'\]\[0\]`"
    with pytest.raises(ValueError, match=rule):
        packed({"a": [(1, 2)]})
    with pytest.raises(ValueError, match=r"`extras` must be .*got `extras\['own'\]\[0"):
        packed({"a": PerProcess((1, 2))})
    cycle = {}
    cycle["a"] = [cycle]
    with pytest.raises(ValueError, match=r"`extras` must be .*cannot write"):
        packed(cycle)
    with pytest.raises(ValueError, match=r"`extras` must be .*got `extras` itself"):
        packed([1])


def test_repr_of_a_marked_value_shows_its_contents():
    assert repr(PerProcess(b"a")) == "PerProcess(b'a')"
    assert repr(unpacked(written({"a": PerProcess(1)}))) == (
        "{'a': PerProcess(saved=(1,))}"
    )


def test_bytes_and_own_values_pass_through_a_checkpoint(manager):
    train = train_step()
    extras = {**EXTRAS, "own": PerProcess(b"loader")}
    checkpoint.save(manager, init(train), extras)
    found = checkpoint.restore(manager, train, init(train)).extras
    assert found.pop("own").value == b"loader"
    assert found == EXTRAS


def loaders():
    """Returns a new iterator of each kind that Grain has."""
    import grain

    data = grain.MapDataset.range(20).shuffle(seed=1).batch(2)
    sampler = grain.samplers.IndexSampler(20, grain.sharding.NoSharding(), num_epochs=1)
    loader = grain.DataLoader(data_source=range(20), sampler=sampler, worker_count=0)
    return iter(data.to_iter_dataset()), iter(loader)


@pytest.mark.skipif(
    importlib.util.find_spec("grain") is None, reason="grain is not installed"
)
def test_states_of_grain_iterators_continue_at_their_place():
    for n in range(2):
        iterator, other = loaders()[n], loaders()[n]
        for _ in range(3):
            next(iterator)
        kept = unpacked(written({"data": PerProcess(iterator.get_state())}))
        other.set_state(kept["data"].value)
        assert repr(next(other)) == repr(next(iterator))
