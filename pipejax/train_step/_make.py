"""`make_train_step`: a loss, an optimizer and a mesh, made into Pipe-SGD."""

from typing import Literal

import optax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from pipejax.collectives import AllReduce, Schedule, psum
from pipejax.executors import StepConfig
from pipejax.mesh import AxisName

from ._check_settings import (
    check_all_reduce,
    check_axis_name,
    check_count,
    check_executor,
    check_feedback,
    check_flag,
    check_floating,
    check_mesh,
    check_tx,
    check_width,
)
from ._local_step import LocalStep
from ._loss import Loss
from ._step import TrainStep


def make_train_step(
    loss_fn: Loss,
    tx: optax.GradientTransformation,
    *,
    mesh: Mesh,
    width: int = 2,
    warmup_steps: int = 0,
    microbatches: int = 1,
    compute_dtype: DTypeLike | None = None,
    reduce_dtype: DTypeLike | None = None,
    axis_name: AxisName = "data",
    donate: bool = False,
    all_reduce: AllReduce | Schedule = psum(),
    weight_prediction: bool = True,
    deviation_feedback: float = 0.0,
    executor: Literal["auto", "fused", "host"] = "auto",
    skip_nonfinite: bool = True,
) -> TrainStep:
    """Makes a data-parallel train step of pipeline width K.

    With `w` the parameters, `u` the update of `tx`, `g` the mean gradient over devices:

      `w[t] = w[t-1] - u(g[t-K])`,  `g[t] = 1/p sum_i grad f_i(v_i[t])`

    where `v_i[t]` is `w[t]` with device i's own K-1 gradients in flight applied to it
    (`weight_prediction`), so that a gradient is not taken where the parameters were but
    about where they will be. `width=1` is synchronous data-parallel SGD. At `width=2`
    the all-reduce of one step's gradients runs while the next step computes; wider
    pipelines only absorb jitter.

    Args:
      loss_fn: `loss_fn(params, batch) -> scalar`, a mean over the examples it is given;
        where it is a weighted mean, as over tokens that are no padding, it returns the
        sum of the weights, `pj.Aux(weight=...)`.
        In full `loss_fn(params, batch, *, model_state, rng) -> (scalar, pj.Aux(...))`:
        it is passed the keywords that `init` was given, and returns what it has.
      tx: any Optax transformation. It sees the reduced gradient, so clipping by global
        norm inside it is clipping by the true norm.
      mesh: devices, such as `pj.data_mesh()`.
      width: pipeline width K, at least 1.
      warmup_steps: first so many steps run with width 1.
      microbatches: parts, run in turn, of each device's share of a batch.
      compute_dtype: floating parameters and inputs are cast to it inside the loss;
        parameters, optimizer state and gradients keep the parameters' dtype.
      reduce_dtype: dtype in which gradients and changes of model state are sent and
        summed; `None` keeps their own. Loss, metrics and weight travel as float32.
      axis_name: the mesh axis of the data, or the two, `("host", "device")`.
      donate: let a step overwrite the state it is given, which may not be used after
        it. The fused executor takes all of it, except messages in flight that stay in
        flight, which the next state has too. The host executor takes all but what is in
        flight, which may still be being sent.
      all_reduce: how gradients are summed, and what travels: by default
        `pj.collectives.psum()`, the backend's own; `two_shot(pj.codecs.int8())` sends
        a quarter of the bytes. `pj.collectives.scheduled` begins with one and goes on
        with another. Loss, metrics and model state travel uncompressed.
      weight_prediction: take each gradient where this device's own gradients in flight,
        in place of the means that are not there yet, would lead. On a quadratic a
        linear optimizer then takes synchronous steps, noise and all, up to the learning
        rate of `pj.stability.max_learning_rate`; on one device any does at any. It
        changes nothing in `tx`, costs `width - 1` updates a step and sends nothing.
        False takes it at the parameters as they are, `v_i[t] = w[t]`, the paper's
        recursion, which loses SGD with momentum most of its stability.
      deviation_feedback: a share c of what this device's last reduced gradient differed
        from its mean by. Weight prediction adds it to the oldest gradient in flight. At
        width 2 c = 0.5 doubles the learning rate up to which devices stay together
        (`pj.stability`), meant for SGD with momentum; it costs the memory of one
        gradient, and in flat directions devices lie a little further apart.
      executor: `"fused"` runs a step as one program, `"host"` sums on a thread beside
        it; `"auto"` takes what hides communication on these devices, and says which
        and why in `train.executor`.
      skip_nonfinite: skip an update whose reduced gradient, or change of model state,
        is not finite, and count it. False leaves that to the optimizer
        (`optax.apply_if_finite`, `optax.zero_nans`); a codec of the all-reduce then
        still keeps nothing of such a gradient.

    Returns:
      A `TrainStep`: `init`, `step` and `drain`.

    Raises:
      ValueError: for an argument that breaks a rule named in the message.

    >>> import jax.numpy as jnp, optax, pipejax as pj
    >>> def loss_fn(w, batch):
    ...     return 0.5 * jnp.mean((w - batch) ** 2)
    >>> train = pj.make_train_step(loss_fn, optax.sgd(0.1), mesh=pj.data_mesh(1))
    >>> state = train.init(jnp.array(1.0))
    >>> for _ in range(3):
    ...     state, info = train.step(state, jnp.zeros(4))
    >>> print(f"{state.params:.2f}")  # 1, 0.9, 0.9**2: synchronous steps, one behind
    0.81
    """
    axis_name = check_axis_name(axis_name)
    mesh = check_mesh(mesh, axis_name)
    work = LocalStep(
        loss_fn=loss_fn,
        tx=check_tx(tx),
        microbatches=check_count("microbatches", microbatches, 1),
        compute_dtype=check_floating("compute_dtype", compute_dtype),
        reduce_dtype=check_floating("reduce_dtype", reduce_dtype),
        axis_name=axis_name,
        platform=mesh.devices.flat[0].platform,
        weight_prediction=check_flag("weight_prediction", weight_prediction),
        deviation_feedback=check_feedback(deviation_feedback, weight_prediction),
        skip_nonfinite=check_flag("skip_nonfinite", skip_nonfinite),
    )
    schedule = check_all_reduce(all_reduce, axis_name)
    config = StepConfig(
        work=work,
        mesh=mesh,
        axis_name=axis_name,
        width=check_width(width),
        all_reduce=schedule.phases[-1],
        donate=donate,
    )
    return TrainStep(
        config=config,
        schedule=schedule,
        warmup_steps=check_count("warmup_steps", warmup_steps, 0),
        executor_name=check_executor(executor),
    )
