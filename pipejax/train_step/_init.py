"""Makes the state before the first step, or its shapes and shardings."""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from pipejax._core.checks import (
    check_arrays,
    check_attached,
    check_keys,
    check_keywords,
    check_opt_state,
    check_optimizer,
    check_params,
)
from pipejax._core.executors import (
    StepConfig,
    in_flight_shardings,
    state_shardings,
)
from pipejax._core.message import Message, empty
from pipejax._core.step import (
    Common,
    Inputs,
    PipelineState,
    Trainable,
    common_of,
    delays,
    inner_state_specs,
    inputs_over,
    parted,
    state_data_specs,
    state_of,
)
from pipejax._internal.mesh import inner_axes, is_traced
from pipejax._internal.shards import UNSHARDED, Shards, data_axes_of, inner_specs
from pipejax._internal.structures import restructured
from pipejax._internal.types import Keys, ModelState

from ._one_program import check_same_settings, described, settings_of
from ._replicate import check_same, check_same_in_groups, placed

_MUCH = 0.1  # a share of the parameters
_log = logging.getLogger(__name__)


class Arguments(NamedTuple):
    """The arrays that `train.init` is given, which its arguments of these names hold.

    Attributes:
      params: Parameters.
      model_state: Model state, or `None`.
      rng: PRNG keys, or `None`.
      opt_state: Optimizer state, or `None` for a new one.
    """

    params: optax.Params
    model_state: ModelState
    rng: Keys
    opt_state: optax.OptState


class Plan(NamedTuple):
    """How a state is made from the arrays that `train.init` is given.

    Attributes:
      make: Function from the given arrays to the state.
      specs: Partition specs of the given arrays, over inner axes.
      shapes: The state as `jax.ShapeDtypeStruct`s with shardings.
      message: The shapes of the message of one device or group.
    """

    make: Callable[[Arguments], PipelineState]
    specs: Arguments
    shapes: PipelineState
    message: Message


def initial(
    phases: Sequence[StepConfig],
    arguments: Arguments,
    plan: Plan,
    settings: dict[str, Any],
) -> PipelineState:
    """Lays out the state, with nothing in flight and without codec states.

    `phases` are the configurations of all phases of a run, and `settings` are others
    that must be the same on all processes, by the names of arguments. On several
    processes, placing the arrays is a collective, so no other collective may be under
    way.
    """
    config = phases[-1]
    check_attached(config.mesh, arguments.params)
    if inner_axes(config.mesh, config.axis_name) and is_traced():
        raise ValueError(
            "`train.init` must not be traced on a mesh with inner axes, because a"
            " traced array does not say how it is sharded; got a trace. For the shapes"
            " and shardings of the state, call `train.abstract_state(params, ...)`."
        )
    shardings = jax.tree.map(lambda shape: shape.sharding, plan.shapes)
    arrays = placed(arguments._asdict(), plan.specs._asdict(), config.mesh)
    delayed = config.step.settings.delayed
    if config.mesh.is_multi_process and not is_traced():
        texts = {name: described(value) for name, value in settings.items()}
        check_same_settings(texts | settings_of(phases, plan.shapes.opt_state))
        keys = [key for each in phases for key in _codec_keys(each)]
        told: dict[str, Any] = {"codec.key": keys} if keys else {}
        if delayed is not None:
            told["delayed"] = delays(delayed, arguments.params)
        if told:
            check_same(told, "make_train_step")
    if plan.shapes.shards:
        check_same_in_groups(arrays, config)
    made = jax.jit(plan.make, out_shardings=shardings)(Arguments(**arrays))
    # On CPUs, `arrays` may share the memory of NumPy arrays, which may be written into.
    return jax.block_until_ready(made)


def _codec_keys(config: StepConfig) -> list[jax.Array]:
    """Returns the keys of codecs that draw numbers, the same on every process."""
    settings = config.step.settings
    codecs: list[Any] = [*config.all_reduce.codecs]
    codecs += [settings.at_once, settings.gather_codec]
    return [codec.key for codec in codecs if hasattr(codec, "key")]


def planned(config: StepConfig, arguments: Arguments, inputs: Inputs | None) -> Plan:
    """Checks what `train.init` is given, and returns how the state is made from it."""
    check_params(arguments.params)
    delays(config.step.settings.delayed, arguments.params)
    check_arrays("model_state", arguments.model_state)
    check_keys(arguments.rng)
    loss_fn = config.step.settings.loss_fn
    keywords = {"model_state": arguments.model_state, "rng": arguments.rng}
    if inputs is not None:
        keywords["shared"] = inputs.shared
    check_keywords(loss_fn, "train.init", keywords)
    specs = _argument_specs(config, arguments)
    _check_optimizer(config, arguments)
    forms = jax.eval_shape(lambda arguments: arguments, arguments)
    shards = _argument_shards(config, forms, specs)
    like = _message_form(config, forms, inputs, shards)
    # With a sharded optimizer, the form of the message decides how the state is split.
    shards = config.step.layout(forms.params, shards, like, config.mesh)
    make = _maker(config, forms, like, shards)
    return Plan(make, _specs_of(forms, shards), _shapes(config, make, forms), like)


def _check_optimizer(config: StepConfig, arguments: Arguments) -> None:
    settings, own = config.step.settings, arguments.opt_state
    if own is None:
        own = jax.eval_shape(settings.tx.init, arguments.params)
    plain = config.width > 1 and not settings.weight_prediction
    check_optimizer(own, plain_delay=plain, local_steps=settings.local_steps)
    if arguments.opt_state is not None:
        remedy = (
            "Make the train step with the optimizer that the state is of, or leave it"
            " out to begin with a new one."
        )
        check_opt_state(
            settings.tx, arguments.params, arguments.opt_state, "opt_state", remedy
        )


def _argument_specs(config: StepConfig, arguments: Arguments) -> Arguments:
    """Returns how the given arrays are split over inner axes, as they come."""
    mesh, axis, gathers = config.mesh, config.axis_name, config.step.shards_optimizer
    pairs = arguments._asdict().items()
    return Arguments(
        *(inner_specs(*pair, mesh, axis, gathers=gathers) for pair in pairs)
    )


def _argument_shards(config: StepConfig, forms: Arguments, specs: Arguments) -> Shards:
    """Returns how a state is split, before the optimizer's state is planned."""
    shards = UNSHARDED
    if inner := inner_axes(config.mesh, config.axis_name):
        shards = Shards(specs.params, specs.model_state, inner=inner)
    if config.step.shards_optimizer:
        mesh = config.mesh.shape
        data_axes = data_axes_of(forms.params, specs.params, config.devices, mesh)
        _log_whole(forms.params, data_axes, config.devices)
        shards = dataclasses.replace(shards, data_axes=data_axes)
    return shards


def _log_whole(
    params: optax.Params, data_axes: Sequence[int | None], devices: int
) -> None:
    """Logs a warning if much of the model is not divided among the devices."""
    sizes = [leaf.size for leaf in jax.tree.leaves(params)]
    pairs = zip(sizes, data_axes, strict=True)
    whole = sum(size for size, axis in pairs if axis is None)
    if devices > 1 and whole > _MUCH * sum(sizes):
        _log.warning(
            "%.0f %% of the parameters have no free axis that divides among %d devices:"
            " every device updates all of them, and no codec encodes their gradients",
            100 * whole / sum(sizes),
            devices,
        )


def _maker(
    config: StepConfig, forms: Arguments, like: Message, shards: Shards
) -> Callable[[Arguments], PipelineState]:
    step = config.step

    def local(arguments: Arguments) -> PipelineState:
        params, model_state, rng, opt_state = arguments
        new = step.settings.tx.init(params)
        opt_state = new if opt_state is None else restructured(opt_state, new)
        opt_state = jax.tree.map(jnp.asarray, opt_state)  # may be Python numbers
        whole = Trainable(params, opt_state, shards=shards)
        length = config.width - 1
        return PipelineState(
            trainable=step.init(whole, length),
            model_state=model_state,
            in_flight=empty(like, config.width, {}),
            rng=rng,
            skipped=jnp.zeros((), jnp.int32),
            step=jnp.zeros((), jnp.int32),
            calls=None,
        )

    # The structure of the state decides how its arrays are split.
    form = jax.eval_shape(config.on_mesh(local, P(), P()), forms)
    specs = state_data_specs(common_of(form), config.axis_name)
    return config.on_mesh(local, P(), state_of(specs, config.queue_specs, None))


def _shapes(
    config: StepConfig, make: Callable[[Arguments], PipelineState], forms: Arguments
) -> PipelineState:
    state = jax.eval_shape(make, forms)
    shardings = state_of(
        state_shardings(common_of(state), config.mesh, config.axis_name),
        in_flight_shardings(state.in_flight, config),
        None,
    )
    return jax.tree.map(
        lambda shape, sharding: shape.update(sharding=sharding), state, shardings
    )


def _specs_of(arguments: Arguments, shards: Shards) -> Arguments:
    params, model_state, rng, opt_state = arguments
    shards = dataclasses.replace(shards, opt_state=())  # there may be no state yet
    trained = Trainable(params, opt_state, shards=shards)
    nothing: Any = None
    specs = inner_state_specs(Common(trained, model_state, rng, nothing, nothing))
    trained = specs.trainable
    return Arguments(trained.params, specs.model_state, specs.rng, trained.opt_state)


def _message_form(
    config: StepConfig,
    arguments: Arguments,
    inputs: Inputs | None,
    shards: Shards,
) -> Message:
    """Returns the shapes of the message of one device or group.

    Without `inputs`, the loss is taken to be the only passenger, and every leaf of the
    model state that can be averaged to change.
    """
    params, model_state, rng, _ = arguments
    if inputs is None:
        return config.empty_messages(params, model_state, shards)[0]

    def local(
        params: optax.Params, model_state: ModelState, rng: Keys, inputs: Inputs
    ) -> Message:
        message, _ = config.step.message(params, model_state, rng, inputs, shards)
        return parted(config.step.settings, params, message)[0]

    local = config.on_mesh(local, (P(), P(), P(), inputs_over(config.axis_name)), P())
    return jax.eval_shape(local, params, model_state, rng, inputs)
