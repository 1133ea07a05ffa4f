"""Makes the state before the first step, or its shapes and shardings."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from pipejax._core.checks import check_opt_state, check_optimizer
from pipejax._core.executors import StepConfig
from pipejax._core.message import InFlight, Message, empty
from pipejax._core.prediction import Mean
from pipejax._internal.mesh import axes, inner_axes, is_traced
from pipejax._internal.shards import UNSHARDED, Shards, cut_axes, inner_specs
from pipejax._internal.structures import restructured

from ._check_arrays import check_arrays, check_keys
from ._check_input import (
    check_attached,
    check_batch,
    check_keywords,
    check_params,
)
from ._feed import Batch, laid_out
from ._gradient import empty_message
from ._local_step import LocalStep
from ._replicate import check_same_in_groups, placed
from ._shardings import in_flight_shardings, state_shardings
from ._state import SharedState


class Given(NamedTuple):
    """The arrays that `train.init` is given, which its arguments of these names hold.

    Attributes:
      params: Parameters.
      model_state: Model state, or `None`.
      rng: PRNG keys, or `None`.
      opt_state: Optimizer state, or `None` for a new one.
    """

    params: Any
    model_state: Any
    rng: Any
    opt_state: Any


class Plan(NamedTuple):
    """How a state is made from the arrays that `train.init` is given.

    Attributes:
      make: Function from the given arrays to the state and the pipeline.
      specs: Partition specs of the given arrays, over inner axes.
      shapes: The state and the pipeline as `jax.ShapeDtypeStruct`s with shardings.
    """

    make: Callable[[Given], tuple[SharedState, InFlight]]
    specs: Given
    shapes: tuple[SharedState, InFlight]


def initial(
    local_step: LocalStep,
    config: StepConfig,
    given: Given,
    batch: Any,
    *,
    feeds_back: bool,
) -> tuple[SharedState, InFlight]:
    """Lays out the state, and a pipeline with nothing in flight.

    On several processes, placing the arrays is a collective, so no other collective may
    be under way.

    Returns:
      The shared state, and the empty pipeline of all devices without codec states.

    Raises:
      ValueError: If `train.init` must not be given one of the arguments.
    """
    check_attached(config.mesh, given.params)
    if inner_axes(config.mesh, config.axis_name) and is_traced():
        raise ValueError(
            "`train.init` must not be traced on a mesh with inner axes, because a"
            " traced array does not say how it is sharded; got a trace. For the shapes"
            " and shardings of the state, call `train.abstract_state(params, ...)`."
        )
    plan = planned(local_step, config, given, batch, feeds_back=feeds_back)
    shardings = jax.tree.map(lambda shape: shape.sharding, plan.shapes)
    arrays = placed(given._asdict(), plan.specs._asdict(), config.mesh)
    if plan.shapes[0].shards:
        check_same_in_groups(arrays, config)
    made = jax.jit(plan.make, out_shardings=shardings)(Given(**arrays))
    # On CPUs, `arrays` may share the memory of NumPy arrays, which may be written into.
    return jax.block_until_ready(made)


def planned(
    local_step: LocalStep,
    config: StepConfig,
    given: Given,
    batch: Any,
    *,
    feeds_back: bool,
) -> Plan:
    """Checks what `train.init` is given, and returns how the state is made from it.

    Args:
      local_step: What each device does in a step.
      config: The step.
      given: Arrays, or `jax.ShapeDtypeStruct`s with shardings.
      batch: One batch or its shapes, or `None`.
      feeds_back: Whether the pipeline keeps a deviation.

    Raises:
      ValueError: If `train.init` must not be given one of the arguments.
    """
    check_params(given.params)
    check_arrays("model_state", given.model_state)
    check_keys(given.rng)
    check_keywords(local_step.loss_fn, model_state=given.model_state, rng=given.rng)
    found = {
        name: inner_specs(
            name,
            tree,
            config.mesh,
            config.axis_name,
            gathers=local_step.shard_optimizer,
        )
        for name, tree in given._asdict().items()
    }
    tx = local_step.tx
    new = jax.eval_shape(tx.init, given.params)
    check_optimizer(
        new if given.opt_state is None else given.opt_state,
        plain_delay=config.width > 1 and not local_step.weight_prediction,
    )
    if given.opt_state is not None:
        check_opt_state(tx, given.params, given.opt_state, "opt_state", _OTHER_TX)
    forms, shards = jax.eval_shape(lambda given: given, given), UNSHARDED
    if inner_axes(config.mesh, config.axis_name):
        inner = inner_axes(config.mesh, config.axis_name)
        shards = Shards(found["params"], found["model_state"], inner=inner)
    if local_step.shard_optimizer:
        cuts = cut_axes(forms.params, found["params"], config.devices)
        shards = dataclasses.replace(shards, cuts=cuts)
    like = _message_form(local_step, config, forms, batch, shards)
    shards = local_step.placed(forms.params, like, config.mesh)
    like = like._replace(shards=shards)
    count = config.width - 1
    mean = _mean_form(local_step, config, forms.params, shards)
    # Devices with pieces of the optimizer take its state for new until this is true.
    known = local_step.shard_optimizer and given.opt_state is not None

    def whole(given: Given) -> SharedState:
        params, model_state, rng, opt_state = given
        kept = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), mean)
        if kept is not None:
            kept = kept._replace(known=jnp.array(known))
        opt_state = (
            tx.init(params) if opt_state is None else restructured(opt_state, new)
        )
        return SharedState(
            params=params,
            opt_state=jax.tree.map(jnp.asarray, opt_state),  # may be Python numbers
            model_state=model_state,
            rng=rng,
            skipped=jnp.zeros((), jnp.int32),
            step=jnp.zeros((), jnp.int32),
            shards=shards,
            mean=kept,
        )

    over_data = jax.eval_shape(whole, forms).over_data(config.axis_name)

    def local(given: Given) -> tuple[SharedState, InFlight]:
        state = local_step.in_pieces(whole(given), over_data, count)
        return state, empty(like, config.width, {}, feeds_back=feeds_back)

    out = over_data
    if local_step.shard_optimizer:
        out = over_data._replace(gathered=P(), slopes=P())
    make = config.on_mesh(local, P(), (out, P(config.axis_name)))
    state, in_flight = jax.eval_shape(make, forms)
    shardings = (
        state_shardings(state, config.mesh, config.axis_name),
        in_flight_shardings(in_flight, shards, config, axes(config.axis_name)),
    )
    shapes = jax.tree.map(
        lambda shape, sharding: shape.update(sharding=sharding),
        (state, in_flight),
        shardings,
    )
    return Plan(make, _specs_of(forms, shards), shapes)


def _mean_form(
    local_step: LocalStep, config: StepConfig, params: Any, shards: Shards
) -> Mean | None:
    """Returns the shapes of the mean gradient that states keep, or `None`."""

    def local() -> Mean | None:
        count = config.width - 1
        return local_step.empty_mean(params, count, config.devices, shards)

    # Inside the program of a step, because `tx` may use the axes of the data.
    return jax.eval_shape(config.on_mesh(local, (), P()))


_OTHER_TX = (
    "Make the train step with the optimizer that the state is of, or leave it out to"
    " begin with a new one."
)


def _specs_of(given: Given, shards: Shards) -> Given:
    """Returns the partition specs of the given arrays, over inner axes."""
    nothing: Any = None
    shards = dataclasses.replace(shards, opt_state=())  # there may be no state yet
    state = SharedState(**given._asdict(), skipped=nothing, step=nothing, shards=shards)
    specs = state.specs()
    return Given(*(getattr(specs, name) for name in Given._fields))


def _message_form(
    local_step: LocalStep, config: StepConfig, given: Given, batch: Any, shards: Shards
) -> Message:
    """Returns the shapes of the message of one device or group.

    Without a `batch`, the loss is taken to be the only passenger, and every leaf of the
    model state that can be averaged to change.
    """
    params, model_state, rng, _ = given
    if batch is None:
        dtype = local_step.reduce_dtype
        return jax.eval_shape(lambda: empty_message(params, model_state, dtype, shards))
    check_batch(batch, config.devices, local_step.microbatches)

    def local(params: Any, model_state: Any, rng: Any, batch: Batch) -> Message:
        return local_step.message(params, model_state, rng, batch, shards)[0]

    local = config.on_mesh(local, (P(), P(), P(), P(config.axis_name)), P())
    return jax.eval_shape(local, params, model_state, rng, laid_out(batch, config))
