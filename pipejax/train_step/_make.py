"""Makes a Pipe-SGD train step from a loss function, an optimizer and a mesh."""

import dataclasses
import logging
from typing import Literal

import optax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from pipejax._core.checks import (
    check_all_reduce,
    check_at_once,
    check_axis_name,
    check_count,
    check_delayed,
    check_executor,
    check_flag,
    check_floating,
    check_gather_codec,
    check_mesh,
    check_prediction,
    check_sharded_optimizer,
    check_tx,
    check_width,
)
from pipejax._core.executors import StepConfig
from pipejax._core.step import (
    Delayed,
    Loss,
    Settings,
    device_axis,
    replicated_step,
    zero1_step,
)
from pipejax._internal.mesh import AxisName, explicit_axes, size_along
from pipejax._internal.threads import check_threads
from pipejax.codecs import Codec, Linear
from pipejax.collectives import AllReduce, Schedule, psum

from ._step import TrainStep

_log = logging.getLogger(__name__)
# With up to 16 devices, the default has been seen to end within 0.01 nats of
# synchronous training on MNIST: see docs/convergence.md.
_MANY = 16


def make_train_step(
    loss_fn: Loss,
    tx: optax.GradientTransformation,
    *,
    mesh: Mesh,
    width: int = 2,
    warmup_steps: int = 0,
    microbatches: int = 1,
    compute_dtype: DTypeLike | None = None,
    delayed: Delayed = None,
    at_once: Linear | None = None,
    reduce_dtype: DTypeLike | None = None,
    axis_name: AxisName = "data",
    donate: bool = False,
    all_reduce: AllReduce | Schedule = psum(),
    weight_prediction: Literal["linearized", "own"] | bool = "linearized",
    executor: Literal["auto", "fused", "host"] = "auto",
    skip_nonfinite: bool = True,
    shard_optimizer: bool = False,
    gather_codec: Codec | None = None,
) -> TrainStep:
    r"""Makes a data-parallel train step of pipeline width K.

    Each step

    1. takes the gradient of this batch on every device
    2. averages the gradients of K-1 steps ago over devices, beside 1 if K is above 1
    3. applies the mean gradient with `tx`

    Let `w` be the parameters, `u` the update of `tx`, p the number of devices, and
    `f_i` the loss on the share of device i. Then

    $$w_t = w_{t-1} - u(g_{t-K}), g_t = 1/p \sum_i \nabla f_i(v_{i,t})$$

    `v_{i,t}` is the prediction of device i: the parameters to which the K-1 gradients
    in flight are expected to lead (`weight_prediction`). The gradient is therefore
    taken close to the parameters to which it will be applied. `width=1` is synchronous
    data-parallel training. At `width=2`, the all-reduce of one step's gradients runs
    while the next step computes. Larger widths only absorb jitter.

    On a mesh with more axes than `axis_name`, the devices at one place along
    `axis_name` are a group, which takes the part of a single device. The devices of a
    group shard parameters, optimizer state and messages in flight over the other axes,
    as `init` was given the parameters. XLA adds the collectives inside a group. Each
    device exchanges its own shards with other groups.

    Args:
      loss_fn: Function `loss_fn(params, batch) -> scalar`, which returns a mean over
        the examples that it is given. A weighted mean, such as a mean over tokens that
        are not padding, also returns the sum of the weights, as `pj.Aux(weight=...)`.
        The full form is
        `loss_fn(params, batch, *, model_state, rng) -> (scalar, pj.Aux(...))`. It takes
        the keywords that `init` was given, and sets the fields of `Aux` that it needs.
      tx: An Optax transformation. It sees the mean gradient, so that clipping by global
        norm inside `tx` clips by the norm of the mean gradient. Gradients that it does
        not read, as with `optax.set_to_zero` in `optax.partition`, are neither computed
        nor sent. `init` raises an error for the few optimizers that cannot be delayed
        or averaged.
      mesh: Devices, such as `pj.data_mesh()` or the result of `jax.make_mesh`. Its axes
        may have type Auto or Explicit.
      width: Pipeline width K, at least 1.
      warmup_steps: Number of steps at the start that run at width 1.
      microbatches: Number of parts of each device's share of a batch, whose gradients
        are computed one after another.
      compute_dtype: dtype to which floating parameters and inputs are cast inside the
        loss. Parameters, optimizer state and gradients keep the parameters' dtype.
        `None` casts nothing.
      delayed: Parameters whose gradients are delayed, as a pytree of bools that has the
        structure of the parameters or its beginning, or as a function from parameters
        to such a tree. All other gradients are averaged in the step that computes them,
        beside the rest of its backward pass, and are not K-1 steps old. `tx` sees one
        tree of both kinds. What has not arrived (delayed gradients in the first K-1
        steps, the others in a drain) leaves its parameters and their part of the
        optimizer's state as they are, and each kind counts updates by itself
        (`state.delayed_counters`). Loss, metrics and model state are delayed. `None`
        delays all. A state and its checkpoints are of one choice, except for drained
        checkpoints.
      at_once: A linear codec without error feedback, such as
        `pj.codecs.power_sgd(16, key)`, for what is exchanged at once of every gradient.
        Let L be what the codec keeps of the mean gradient g. Each step exchanges and
        applies its own L, and the rest `g - L` is delayed by K-1 steps. A codec of low
        rank keeps the directions in which devices agree, which are those that a delay
        harms, in few bytes; PowerSGD keeps small matrices and vectors whole. Their
        exchange is not hidden. Every step makes an update, and a drain makes K-1 more,
        which a schedule counts. Gradients are taken at the parameters as they are, and
        `weight_prediction` is ignored, so that the result does not depend on the number
        of devices, unless `all_reduce` has a codec for the rest. Not with `delayed` or
        `shard_optimizer`, and without effect at width 1. `None` delays all of each
        gradient.
      reduce_dtype: dtype in which gradients and changes of model state are sent and
        summed. `None` keeps their own dtypes. Loss, metrics and weight travel as
        float32. float16 is refused if `loss_fn` returns a weight.
      axis_name: Mesh axis of the data, or a tuple of axes: `("host", "device")`.
        Gradients are averaged over these axes. With two axes and several hosts, devices
        that predict average their gradients with those of their host as soon as they
        have computed them, and predict by this mean in place of their own gradients;
        CPUs of several processes do not.
      donate: Whether a step or a drain may overwrite the state that it is given. That
        state must not be used again. The fused executor overwrites all of the state
        except messages that stay in flight, which the next state shares. The host
        executor overwrites all but the messages in flight, because the communication
        thread may still be sending them.
      all_reduce: Algorithm that sums the gradients, with the codec that encodes them.
        The default `pj.collectives.psum()` is the all-reduce of the backend.
        `pj.collectives.two_shot(pj.codecs.int8())` sends about a quarter of the bytes.
        `pj.collectives.scheduled` changes the algorithm at given steps. Loss, metrics
        and model state travel uncompressed.
      weight_prediction: How a device predicts the parameters after the gradients in
        flight, whose means it does not know yet. `"linearized"` expands the update U of
        `tx` at the mean gradient m that was applied last, to first order in the
        device's own gradient g. At width 2, with the state s of the optimizer,

        $$v = w + U(m; s) + P (g - m), P = dU/dg$$

        at m, element by element; sums over arrays, such as a norm, are held. The mean
        of the predictions over devices is then right to first order for any optimizer.
        At larger widths, U is the change by K-1 updates in turn, with a P for each
        gradient. Where U is linear in the gradients, and on a single device, v is
        `w + U(g; s)`. Where an update mixes elements, as that of Muon does, it is
        `w + U((m + g) / 2; s)`. Otherwise, the state also keeps m. `"own"` is always
        `w + U(g; s)`, and keeps no m. With an optimizer that is linear in its
        gradients, training on a quadratic then takes the synchronous steps, for any
        noise, up to the learning rate of `pj.stability.max_learning_rate`. `False`
        takes the gradient at the parameters as they are, `v_{i,t} = w_t`, which is the
        recursion of the paper. SGD with momentum then loses most of its stability.
        Prediction leaves `tx` as it is, costs `width - 1` updates per step, and sends
        nothing. `True` is the default.
      executor: `"fused"` runs a step as one program. `"host"` sums on a thread beside
        the compute. `"auto"` takes the executor that hides communication on these
        devices, and says which one and why in `train.executor`. A single device, which
        exchanges nothing, always runs one program.
      skip_nonfinite: Whether to skip an update if a reduced gradient or change of model
        state is not finite, and to count it. `False` leaves such gradients to the
        optimizer (`optax.apply_if_finite`, `optax.zero_nans`). The codecs of the
        all-reduce keep nothing of such gradients in either case.
      shard_optimizer: Whether each of p devices keeps only 1/p of the optimizer's state
        and of the master parameters, and computes 1/p of the update (ZeRO-1). The
        update then runs between the two halves of the exchange, a reduce-scatter and an
        all-gather, which send the same bytes as the all-reduce, and with prediction the
        slopes of the update in 8 bits besides. `tx` must work element by element, apart
        from sums over whole arrays such as a global norm. `state.params` are split
        along an axis that divides among the devices, and `state.gathered` are the whole
        parameters that every device computes with, in `compute_dtype`. A single device
        divides nothing, but refuses what several would refuse.
      gather_codec: With `shard_optimizer`, a codec for the all-gather, such as
        `pj.codecs.int4()`. The owner of a piece has new values x of what devices have
        gathered as y. It sends the difference, and all devices, itself among them, move
        y by what they decode:

        $$y_t = y_{t-1} + C(x_t - y_{t-1})$$

        What the codec loses is in the next difference. The master parameters
        `state.params` lose nothing. The codec rounds each element to the nearest level,
        and keeps no state. Slopes of weight prediction are sent besides, in 8 bits.
        `None` sends x itself. It has no effect on one device.

    Returns:
      A `TrainStep`, with the methods `init`, `step` and `drain`.

    Raises:
      ValueError: If an argument breaks its rule, which the error message names.

    Examples:
      The third step applies the second gradient. On one device, the parameters are
      those of synchronous steps, one step later:

      >>> import jax.numpy as jnp, optax, pipejax as pj
      >>> def loss_fn(w, batch):
      ...     return 0.5 * jnp.mean((w - batch) ** 2)
      >>> train = pj.make_train_step(loss_fn, optax.sgd(0.1), mesh=pj.data_mesh(1))
      >>> state = train.init(jnp.array(1.0))
      >>> for _ in range(3):
      ...     state, info = train.step(state, jnp.zeros(4))
      >>> print(f"{state.params:.2f}")  # 0.9**2
      0.81

    References:
      Li et al., Pipe-SGD, NeurIPS 2018, https://arxiv.org/abs/1811.03619

      Chen et al., SpecTrain, 2018, https://arxiv.org/abs/1809.02839

      Rajbhandari et al., ZeRO, 2020, https://arxiv.org/abs/1910.02054

      Jia et al., SDP4Bit, 2024, https://arxiv.org/abs/2410.15526
    """
    axis_name = check_axis_name(axis_name)
    mesh = check_mesh(mesh, axis_name)
    check_threads(mesh)
    width = check_width(width)
    sharded = check_flag("shard_optimizer", shard_optimizer)
    rule = check_prediction(weight_prediction)
    codec = check_at_once(at_once, delayed, width, sharded=sharded)
    settings = Settings(
        loss_fn=loss_fn,
        tx=check_tx(tx),
        axis_name=axis_name,
        device_axis=device_axis(mesh, axis_name),
        gather_codec=check_gather_codec(
            gather_codec, size_along(mesh, axis_name), sharded=sharded
        ),
        explicit=explicit_axes(mesh, axis_name),
        branches=mesh.devices.flat[0].platform == "cpu",
        microbatches=check_count("microbatches", microbatches, 1),
        compute_dtype=check_floating("compute_dtype", compute_dtype),
        delayed=check_delayed(delayed, width, sharded=sharded),
        at_once=codec,
        reduce_dtype=check_floating("reduce_dtype", reduce_dtype),
        weight_prediction=rule if codec is None else False,
        skip_nonfinite=check_flag("skip_nonfinite", skip_nonfinite),
    )
    schedule = check_all_reduce(all_reduce, axis_name)
    step = replicated_step(settings)
    if sharded:
        check_sharded_optimizer(schedule, mesh, axis_name, rule, executor)
        step = zero1_step(settings, size_along(mesh, axis_name))
    config = StepConfig(
        step=step,
        mesh=mesh,
        width=width,
        all_reduce=schedule.phases[-1],
        donate=check_flag("donate", donate),
    )
    _log_noise(config)
    warmup = check_count("warmup_steps", warmup_steps, 0)
    warmup = warmup if config.width > 1 else 0
    ends = sorted({*schedule.boundaries, warmup} - {0})
    earlier = tuple(_until(end, config, schedule, warmup) for end in ends)
    return TrainStep(config, check_executor(executor), earlier, tuple(ends))


def _log_noise(config: StepConfig) -> None:
    """Logs that predictions are noisy, where many devices make them by themselves."""
    predicts = config.width > 1 and config.step.settings.weight_prediction
    if predicts and config.messages > _MANY:
        remedy = " With at_once=..., they do not predict."
        _log.warning(
            "%s devices or groups predict with their own gradients, which are noisier"
            " the more of them share a batch.%s See docs/convergence.md, 'How many"
            " devices share a batch'",
            config.messages,
            "" if config.step.shards_optimizer else remedy,
        )


def _until(end: int, config: StepConfig, schedule: Schedule, warmup: int) -> StepConfig:
    all_reduce = schedule.phases[schedule.phase(end - 1)]
    width = 1 if end <= warmup else config.width
    return dataclasses.replace(config, width=width, all_reduce=all_reduce)
