"""Local steps by hand: every group trains alone, and chunks are exchanged beside it."""

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


def trained(loss_fn, tx, outer_tx, params, batches, rounds, groups, chunks=None):
    """Returns the anchor, and the parameters of every group.

    Of H steps, V exchange a chunk as it was before the step. If V is 0, everything is
    exchanged after the last. `rounds` are H and V, and `chunks` say in which chunk each
    element is.
    """
    every, overlap = rounds
    count = max(1, overlap)
    if chunks is None:
        chunks = jax.tree.map(lambda x: chunk_of(x, count), params)
    anchor = jax.tree.map(jnp.asarray, params)
    outer = [outer_tx.init(anchor)] * count
    local, gradient = [(anchor, tx.init(anchor))] * groups, jax.jit(jax.grad(loss_fn))

    def exchanged(anchor, local, sent, number):
        inside = jax.tree.map(lambda x: x == number, chunks)
        mean = jax.tree.map(lambda *x: sum(x) / groups, *sent)
        # Each chunk has a state of its own, of which the elements inside are used.
        updates, outer[number] = outer_tx.update(mean, outer[number], anchor)
        moved = optax.apply_updates(anchor, updates)
        after = jax.tree.map(jnp.where, inside, moved, anchor)

        def of_group(w, d):
            return jax.tree.map(
                lambda w, d, a, b, m: jnp.where(m, w + a - (b - d), w),
                *(w, d, after, anchor, inside),
            )

        pairs = zip(local, sent, strict=True)
        return after, [(of_group(w, d), state) for (w, state), d in pairs]

    def differences(anchor, local):
        return [jax.tree.map(jnp.subtract, anchor, w) for w, _ in local]

    for step, batch in enumerate(batches):
        place = step % every
        sent = differences(anchor, local)
        for i, share in enumerate(shares(batch, groups)):
            w, state = local[i]
            updates, state = tx.update(gradient(w, share), state, w)
            local[i] = optax.apply_updates(w, updates), state
        number = place * overlap // every
        if (place + 1) * overlap // every > number:
            anchor, local = exchanged(anchor, local, sent, number)
        if not overlap and place + 1 == every:
            anchor, local = exchanged(anchor, local, differences(anchor, local), 0)
    return anchor, [w for w, _ in local]
