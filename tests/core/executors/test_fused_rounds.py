"""Tests the fused programs of local steps: which there are, and what they hide."""

import jax
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pipejax as pj

from ...helpers import batches, init_params, loss_fn

FULL = pytest.mark.full


def made(mesh, every, overlap, loss=loss_fn, axis_name="data"):
    return pj.make_local_step(
        loss,
        optax.adamw(1e-2),
        mesh=mesh,
        axis_name=axis_name,
        sync_every=every,
        overlap_steps=overlap,
    )


def test_rounds_under_way_all_the_time_have_three_programs():
    """One without an exchange, one with a chunk, and one with the report of a round."""
    train = made(pj.data_mesh(2), 4, 3)
    state = train.init(init_params())
    for batch in batches(10):
        state, _ = train.step(state, batch)
    programs = train.executor._train.items()
    kinds = {tuple(kind): program._cache_size() for kind, program in programs}
    assert kinds == {
        (False, False): 1,
        (True, False): 1,
        (True, True): 1,
    }


@pytest.mark.parametrize(
    ("names", "spec", "parts"),
    [
        pytest.param("host", P(), 1, marks=FULL),
        pytest.param(("host", "device"), P(), 8, marks=FULL),
        (("host", "fsdp"), P("fsdp"), 8),
    ],
)
def test_chunk_travels_beside_the_compute_on_h100(names, spec, parts):
    """A device sends its part of a chunk, which holds 1/8 of all parameters."""
    devices, hosts = pj.overlap.topology("h100:1x4x8"), 4 if parts > 1 else None
    mesh = pj.data_mesh(devices=devices, axis_name=names, hosts=hosts)

    def loss(layers, x):
        for w in layers:
            x = jax.nn.relu(x @ jax.lax.with_sharding_constraint(w, P()))
        return (x**2).mean()

    train = made(mesh, 8, 8, loss, axis_name="host")
    place, rows = NamedSharding(mesh, spec), NamedSharding(mesh, P(names))
    layers = [jax.ShapeDtypeStruct((512, 512), "float32", sharding=place)] * 4
    state = train.abstract_state(layers)
    batch = jax.ShapeDtypeStruct((32 * 512, 512), "float32", sharding=rows)
    report = pj.overlap.inspect(train.lower(state, batch).compile().as_text())
    size = 4 * 4 * 512 * 512 / 8 / parts + 4  # with a mark
    assert [x.kind for x in report.collectives if x.bytes == size] == ["all-reduce"]
    assert report.covered >= 0.95
