"""Makes a local step from a loss function, two optimizers and a mesh."""

from typing import Literal

import optax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from pipejax._core.checks import (
    check_all_reduce,
    check_axis_name,
    check_count,
    check_executor,
    check_flag,
    check_floating,
    check_mesh,
    check_of_chunks,
    check_outer,
    check_tx,
)
from pipejax._core.executors import RoundConfig, Rounds, StepConfig
from pipejax._core.step import Loss, Settings, replicated_step
from pipejax._internal.mesh import AxisName, explicit_axes
from pipejax._internal.round_schedule import RoundSchedule
from pipejax._internal.threads import check_threads
from pipejax.collectives import AllReduce, psum

from ._local_step import LocalTrainStep


def make_local_step(
    loss_fn: Loss,
    tx: optax.GradientTransformation,
    *,
    mesh: Mesh,
    outer_tx: optax.GradientTransformation | None = None,
    sync_every: int | Literal["auto"] = 16,
    overlap_steps: int | None = None,
    warmup_steps: int = 0,
    microbatches: int = 1,
    compute_dtype: DTypeLike | None = None,
    axis_name: AxisName = "data",
    donate: bool = False,
    all_reduce: AllReduce = psum(),
    executor: Literal["auto", "fused", "host"] = "auto",
    skip_nonfinite: bool = True,
) -> LocalTrainStep:
    r"""Makes a step in which every group trains alone, and exchanges in rounds.

    Group i has parameters `theta_i` and an optimizer state of its own. All groups have
    the same anchor a, `state.params`. Both are cut into V = `overlap_steps` chunks,
    each of which is a slice of every array. A round has H = `sync_every` steps, and V
    of them have a chunk beside them. At the beginning of such a step, group i takes its
    difference in this chunk,

    $$D_i = a - \theta_i$$

    which is averaged over groups beside the compute. The outer optimizer u is given the
    mean as a gradient:

    $$a' = a - u(1/p \sum_i D_i)$$

    At the end of the step, every group moves to where the others are in this chunk, and
    keeps the progress of the step:

    $$\theta_i <- \theta_i + a' - (a - D_i)$$

    With V = 0, the exchange follows the last step of the round at once, and nothing
    hides it. With V = H, every step has a chunk beside it.

    Streaming DiLoCo exchanges some layers of a model at a time. Here, a chunk has a
    part of every layer, and all chunks have the same size, for any model and any V.

    Args:
      loss_fn: As for `make_train_step`.
      tx: The inner optimizer, any Optax transformation. If its updates depend on
        copies of the parameters in its state, as those of
        `optax.contrib.schedule_free` do, an exchange moves these copies, too.
      mesh: Devices. Along `axis_name`, each is a group. If the mesh has more axes, all
        devices at one place along `axis_name` are a group, whose compute XLA splits:
        they divide the batch, or shard the model (docs/local_steps.md).
      outer_tx: The outer optimizer, which works element by element, such as
        `optax.sgd(0.7, momentum=0.9, nesterov=True)`. It is given vectors named by
        their dtypes, so that it cannot tell parameters apart by name or shape. `None`
        is the mean of the groups, `optax.sgd(1.0)`.
      sync_every: Number of steps H of a round, at least 1. "auto" takes as many as hide
        an exchange: `train.init` times both. Checkpoints keep the number.
      overlap_steps: Number of steps V of a round that hide its exchange, from 0 to H.
        `None` is H, so that every step has a chunk beside it.
      warmup_steps: Number of synchronous steps before the first round. They sum
        gradients exactly, and nothing hides the sum. In these steps, `info.loss` is the
        loss of the step itself, and `info.grad_norm` is the norm of the mean gradient.
        Groups that train alone from random parameters move apart.
      microbatches: As for `make_train_step`.
      compute_dtype: As for `make_train_step`.
      axis_name: Mesh axis of the groups, or a tuple of axes.
      donate: Whether a step or a drain may overwrite what groups train, and the chunks
        that it exchanges, in the state that it is given, which must not be used again,
        even if the exchange fails.
      all_reduce: Algorithm that sums the chunks, with its codec, which keeps a state
        for each chunk: error feedback sends what is lost of a chunk in the next round.
      executor: As for `make_train_step`. With "host", the communication thread
        exchanges the chunk of a step.
      skip_nonfinite: Whether a group skips a step whose gradient is not finite.

    Returns:
      A `LocalTrainStep`, with the methods `init`, `step` and `drain`.

    Raises:
      ValueError: If an argument breaks its rule, which the error message names.

    Examples:
      >>> import jax.numpy as jnp, optax, pipejax as pj
      >>> def loss_fn(w, batch):
      ...     return 0.5 * jnp.mean((w - batch) ** 2)
      >>> train = pj.make_local_step(
      ...     loss_fn,
      ...     optax.sgd(0.5),
      ...     mesh=pj.data_mesh(1),
      ...     sync_every=2,
      ...     overlap_steps=1,
      ... )
      >>> state = train.init(jnp.array(1.0))
      >>> for _ in range(2):
      ...     state, info = train.step(state, jnp.zeros(4))
      >>> print(state.params, info.arrived)  # the first step, beside the second
      0.5 True

    References:
      Lin et al., Don't Use Large Mini-Batches, Use Local SGD, ICLR 2020,
      https://arxiv.org/abs/1808.07217

      Douillard et al., DiLoCo, 2023, https://arxiv.org/abs/2311.08105

      Douillard et al., Streaming DiLoCo, 2025, https://arxiv.org/abs/2501.18512
    """
    axis_name = check_axis_name(axis_name)
    mesh = check_mesh(mesh, axis_name)
    check_threads(mesh)
    schedule = _schedule(sync_every, overlap_steps)
    settings = Settings(
        loss_fn=loss_fn,
        tx=check_tx(tx),
        axis_name=axis_name,
        local_steps=True,
        explicit=explicit_axes(mesh, axis_name),
        branches=mesh.devices.flat[0].platform == "cpu",
        microbatches=check_count("microbatches", microbatches, 1),
        compute_dtype=check_floating("compute_dtype", compute_dtype),
        weight_prediction=False,
        skip_nonfinite=check_flag("skip_nonfinite", skip_nonfinite),
    )
    checked = check_all_reduce(all_reduce, axis_name, several=False)
    config = StepConfig(
        step=replicated_step(settings),
        mesh=mesh,
        width=1,
        all_reduce=check_of_chunks(checked.phases[-1]),
        donate=check_flag("donate", donate),
    )
    outer = optax.sgd(1.0) if outer_tx is None else check_outer(outer_tx)
    warmup = check_count("warmup_steps", warmup_steps, 0)
    rounds = RoundConfig(config, outer, schedule, warmup)
    return LocalTrainStep(Rounds(rounds, check_executor(executor)))


def _schedule(
    sync_every: int | Literal["auto"], overlap_steps: int | None
) -> RoundSchedule | None:
    """Returns which steps of a round have a chunk, or `None` if it is timed."""
    if isinstance(sync_every, str):
        if sync_every != "auto" or overlap_steps is not None:
            raise ValueError(
                "`sync_every` must be an integer, or 'auto' without `overlap_steps`,"
                f" which is then as long; got {sync_every!r} and {overlap_steps!r}."
            )
        return None
    overlap = sync_every if overlap_steps is None else overlap_steps
    return RoundSchedule(sync_every, overlap)
