"""Local steps by hand: every group trains alone, and chunks are exchanged beside it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax


def shares(batch, groups):
    """Returns the share of each group of a batch."""

    def share(x, i):
        size = len(x) // groups
        return x[i * size : (i + 1) * size]

    return [jax.tree.map(lambda x, i=i: share(x, i), batch) for i in range(groups)]


def chunk_of(x, count, devices=1):
    """Returns for each element in which of `count` chunks it is.

    A chunk is a slice of every array, which divides among `devices`.
    """
    length = -(-x.size // (count * devices)) * devices
    return (np.arange(x.size) // length).reshape(x.shape)


def trained(
    loss_fn, tx, outer_tx, params, batches, rounds, groups, chunks=None, point=None
):
    """Returns the anchor, and the parameters of every group.

    Of H steps, V exchange a chunk as it was before the step. If V is 0, everything is
    exchanged after the last. `rounds` are H and V, and `chunks` say in which chunk each
    element is. The field `point` of an inner state moves along with the parameters.
    """
    every, overlap = rounds
    count = max(1, overlap)
    if chunks is None:
        chunks = jax.tree.map(lambda x: chunk_of(x, count), params)
    anchor = jax.tree.map(jnp.asarray, params)
    outer = [outer_tx.init(anchor)] * count
    states, own = [tx.init(anchor)] * groups, [anchor] * groups
    update, exchange = _inner(loss_fn, tx), _outer(outer_tx)

    def exchanged(anchor, own, sent, number):
        inside = jax.tree.map(lambda x: x == number, chunks)
        # Each chunk has a state of its own, of which the elements inside are used.
        args = anchor, own, sent, outer[number], inside
        anchor, after, outer[number] = exchange(*args)
        for i in range(groups if point else 0):
            change = jax.tree.map(jnp.subtract, after[i], own[i])
            moved = jax.tree.map(jnp.add, optax.tree.get(states[i], point), change)
            states[i] = optax.tree.set(states[i], **{point: moved})
        return anchor, after

    for step, batch in enumerate(batches):
        place = step % every
        sent = _differences(anchor, own)
        for i, share in enumerate(shares(batch, groups)):
            own[i], states[i] = update(own[i], states[i], share)
        number = place * overlap // every
        # Before the first step, there is nothing to exchange.
        if step and (place + 1) * overlap // every > number:
            anchor, own = exchanged(anchor, own, sent, number)
        if not overlap and place + 1 == every:
            anchor, own = exchanged(anchor, own, _differences(anchor, own), 0)
    return anchor, own


# Compiled, because every operation that runs alone is a program of its own.
@functools.cache
def _inner(loss_fn, tx):
    @jax.jit
    def update(w, state, share):
        updates, state = tx.update(jax.grad(loss_fn)(w, share), state, w)
        return optax.apply_updates(w, updates), state

    return update


@functools.cache
def _outer(tx):
    @jax.jit
    def exchange(anchor, own, sent, state, inside):
        mean = jax.tree.map(lambda *x: sum(x) / len(sent), *sent)
        updates, state = tx.update(mean, state, anchor)
        moved = optax.apply_updates(anchor, updates)
        after = jax.tree.map(jnp.where, inside, moved, anchor)

        def of_group(w, d):
            return jax.tree.map(
                lambda w, d, a, b, m: jnp.where(m, w + a - (b - d), w),
                *(w, d, after, anchor, inside),
            )

        return after, [of_group(*pair) for pair in zip(own, sent, strict=True)], state

    return exchange


@jax.jit
def _differences(anchor, own):
    return [jax.tree.map(jnp.subtract, anchor, w) for w in own]
