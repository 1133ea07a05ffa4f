"""Chooses the gradients that must be delayed so that an exchange is hidden."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from pipejax._internal.numbers import number
from pipejax._internal.types import Tree
from pipejax.train_step import PipelineState, TrainStep


def least_delay(
    train: TrainStep,
    state: PipelineState,
    batch: Tree,
    shared: Tree = None,
    *,
    compute: float,
    exchange: float,
) -> Any:
    r"""Returns the gradients that must be delayed for the exchange to be hidden.

    A backward pass computes the gradients of the last layers first. Their exchange can
    run beside the rest of the pass, as in a synchronous step. Only what does not fit
    there needs a delay. The result is the argument `delayed` of `pj.make_train_step`.

    Let `r_i` be the time at which gradient i is computed, `x_i` the time to exchange
    it, and c the time of the compute. The exchange of what is delayed runs first, from
    the beginning of the step on. The others follow, in the order in which they are
    computed. Exchange i then ends at

    $$e_i = \max(e_{i-1}, r_i) + x_i, e_0 = \sum_{j delayed} x_j$$

    Chosen is the smallest number of delayed gradients, those computed last, for which
    no exchange ends after c. If all exchanges together take longer than c, all are
    delayed. `r_i` follows from the FLOPs of the traced program, and `x_i` from the
    bytes. Layers in a `lax.scan`, and microbatches, have their gradients at the end.

    Args:
      train: A train step of any width.
      state: Its state, or the shapes of it.
      batch: A batch, as arrays or shapes.
      shared: As for `train.step`.
      compute: Seconds of a step without its exchange, above 0.
      exchange: Seconds of the exchange of all gradients, at least 0.

    Returns:
      Pytree of bools with the structure of the parameters. If none is true, nothing
      needs a delay: take `width=1`.

    Raises:
      ValueError: If `train` is a local step, if a time is out of range, or as in
        `train.step`.

    Examples:
      The exchange takes as long as the compute. The gradient of the first layer is
      computed last, after all of the FLOPs:

      >>> import jax, jax.numpy as jnp, optax, pipejax as pj
      >>> def loss_fn(params, x):
      ...     for w in params:
      ...         x = jnp.tanh(x @ w)
      ...     return jnp.mean(x**2)
      >>> train = pj.make_train_step(loss_fn, optax.sgd(0.1), mesh=pj.data_mesh(1))
      >>> state = train.abstract_state([jax.ShapeDtypeStruct((8, 8), "float32")] * 4)
      >>> batch = jax.ShapeDtypeStruct((4, 8), "float32")
      >>> least_delay(train, state, batch, compute=1.0, exchange=0.9)
      [True, True, False, False]

    Reference:
      Chen et al., SAPipe, NeurIPS 2022,
      https://papers.nips.cc/paper_files/paper/2022/hash/725ce5f2b1a8e2e0ac66994e7fefe375-Abstract-Conference.html
    """
    if not isinstance(train, TrainStep):
        raise ValueError(
            "`train` must be a pj.TrainStep, got a"
            f" {type(train).__name__}. Make it with pj.make_train_step: only a pipeline"
            " delays gradients."
        )
    if not 0 < number(compute) < np.inf:
        raise ValueError(
            f"`compute` must be a number of seconds above 0, got {compute!r}. Measure"
            " it with pj.overlap.measure."
        )
    if not 0 <= number(exchange) < np.inf:
        raise ValueError(
            "`exchange` must be a number of seconds of at least 0, got"
            f" {exchange!r}. Measure it with pj.overlap.measure."
        )
    ready = train.ready_after(state, batch, shared)
    params = state.trainable.whole_params
    leaves, structure = jax.tree.flatten(params)
    # A frozen parameter has no gradient, and sends nothing: its time is `None`.
    trained = jax.tree.map(lambda _, time: time is not None, params, ready)
    ends = jax.tree.map(lambda _, time: compute * (time or 0.0), params, ready)
    sent, times = jax.tree.leaves(trained), jax.tree.leaves(ends)
    sizes = np.array([leaf.size * leaf.dtype.itemsize for leaf in leaves]) * sent
    seconds = exchange * sizes / max(sizes.sum(), 1)
    return jax.tree.unflatten(structure, fewest(times, seconds.tolist(), compute))


def fewest(
    ready: Sequence[float], seconds: Sequence[float], compute: float
) -> list[bool]:
    """Returns which of several exchanges begin a step late, so that all are hidden.

    Args:
      ready: When each gradient is computed, in seconds from the start of a step.
      seconds: How long the exchange of each takes.
      compute: When the compute of a step ends.
    """
    order = sorted(range(len(ready)), key=lambda i: ready[i])
    for count in reversed(range(len(order) + 1)):
        end = sum(seconds[i] for i in order[count:])
        for i in order[:count]:
            end = max(end, ready[i]) + seconds[i]
        # Times that are equal but for rounding count as equal.
        if end <= compute * (1 + 1e-9):
            late = {*order[count:]}
            return [i in late for i in range(len(order))]
    return [True] * len(order)
