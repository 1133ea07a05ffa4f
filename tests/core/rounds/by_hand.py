"""Local steps by hand: every group trains alone, and all exchange in rounds."""

import jax
import jax.numpy as jnp
import optax


def shares(batch, groups):
    """Returns the share of each group of a batch."""

    def share(x, i):
        size = len(x) // groups
        return x[i * size : (i + 1) * size]

    return [jax.tree.map(lambda x, i=i: share(x, i), batch) for i in range(groups)]


def trained(loss_fn, tx, outer_tx, params, batches, groups, every, overlap):
    """Returns the anchor, and the parameters of every group.

    A round of `every` steps is exchanged as a whole, `overlap` steps after its end.
    """
    anchor = jax.tree.map(jnp.asarray, params)
    outer, local = outer_tx.init(anchor), [(anchor, tx.init(anchor))] * groups
    gradient, waiting = jax.jit(jax.grad(loss_fn)), None

    def arrive(anchor, outer, local, sent):
        mean = jax.tree.map(lambda *x: sum(x) / groups, *sent)
        updates, outer = outer_tx.update(mean, outer, anchor)
        after = optax.apply_updates(anchor, updates)
        moved = [
            (jax.tree.map(lambda w, a, b, d: w + a - (b - d), w, after, anchor, d), s)
            for (w, s), d in zip(local, sent, strict=True)
        ]
        return after, outer, moved

    for number, batch in enumerate(batches, 1):
        for i, share in enumerate(shares(batch, groups)):
            w, state = local[i]
            updates, state = tx.update(gradient(w, share), state, w)
            local[i] = optax.apply_updates(w, updates), state
        if waiting is not None and number == waiting[0]:
            anchor, outer, local = arrive(anchor, outer, local, waiting[1])
            waiting = None
        if number % every == 0:
            sent = [jax.tree.map(jnp.subtract, anchor, w) for w, _ in local]
            if overlap:
                waiting = number + overlap, sent
            else:
                anchor, outer, local = arrive(anchor, outer, local, sent)
    return anchor, [w for w, _ in local]
