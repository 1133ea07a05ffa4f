"""Tests the fused programs of local steps: which there are, and what they hide."""

import jax
import numpy as np
import optax

import pipejax as pj

from ...helpers import batches, init_params, loss_fn


def made(mesh, every, overlap, loss=loss_fn):
    return pj.make_local_step(
        loss, optax.adamw(1e-2), mesh=mesh, sync_every=every, overlap_steps=overlap
    )


def test_rounds_under_way_all_the_time_have_three_programs():
    """One without an exchange, one with a chunk, and one that ends a round."""
    train = made(pj.data_mesh(2), 3, 3)
    state = train.init(init_params())
    for batch in batches(10):
        state, _ = train.step(state, batch)
    programs = train.executor._train.items()
    kinds = {tuple(kind): program._cache_size() for kind, program in programs}
    assert kinds == {
        (False, False, False): 1,
        (False, False, True): 1,
        (True, False, False): 1,
        (True, True, False): 0,
        (True, True, True): 1,
    }


def test_chunk_travels_beside_the_compute_on_h100():
    mesh = pj.data_mesh(devices=pj.overlap.topology("h100:1x4x8"))

    def loss(layers, x):
        for w in layers:
            x = jax.nn.relu(x @ w)
        return (x**2).mean()

    train = made(mesh, 8, 8, loss)
    layers = [jax.ShapeDtypeStruct((512, 512), "float32")] * 4
    state = jax.eval_shape(train.init, layers)
    state = state._replace(position=state.position._replace(left=np.int32(3)))
    batch = jax.ShapeDtypeStruct((32 * 512, 512), "float32")
    report = pj.overlap.inspect(train.lower(state, batch).compile().as_text())
    chunk = max(report.collectives, key=lambda found: found.bytes)
    assert (chunk.kind, chunk.bytes) == ("all-reduce", 4 * 4 * 512 * 512 / 8)
    assert report.covered >= 0.95
