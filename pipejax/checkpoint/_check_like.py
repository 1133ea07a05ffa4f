"""Checks that the form to restore is that of a state of the train step."""

import dataclasses
from typing import Any

import jax
import optax

from pipejax._core.checks import opt_state_difference
from pipejax._core.message import messages_of, width_of
from pipejax._internal.mesh import inner_axes
from pipejax.train_step import LocalState, LocalTrainStep, PipelineState, TrainStep


def form_of(like: Any, train: TrainStep) -> PipelineState:
    """Returns the shapes and dtypes of `like`, which must be a state of `train`."""
    if not isinstance(train, TrainStep):
        raise ValueError(
            "`train` must be the train step that continues the run, got"
            f" {type(train).__name__}. Pass what pj.make_train_step, or"
            " pj.make_local_step, returned."
        )
    if not isinstance(like, PipelineState):
        raise ValueError(
            "`like` must be a pj.PipelineState of the form to restore, got"
            f" {type(like).__name__}. {_PASS}"
        )
    inner = inner_axes(train.mesh, train.axis_name)
    rules = {
        "width": (train.width, width_of(like.in_flight)),
        "devices": (train.config.devices, like.in_flight.filled.shape[0]),
        "messages": (train.config.messages, messages_of(like.in_flight)),
        "inner axes": (inner, like.shards.inner),
        "shard_optimizer": (
            train.config.step.shards_optimizer,
            bool(like.shards.data_axes),
        ),
    }
    _check_rules(rules)
    return jax.eval_shape(lambda tree: tree, like)


def rounds_form_of(like: Any, train: LocalTrainStep) -> LocalState:
    """Returns shapes and dtypes of `like`, which must be a state of a local step."""
    if not isinstance(like, LocalState):
        raise ValueError(
            "`like` must be a pj.LocalState of the form to restore, got"
            f" {type(like).__name__}. {_PASS}"
        )
    config, shared = train.rounds.config, like.shared
    mesh, axis = config.inner.mesh, config.inner.axis_name
    rules = {
        "groups": (config.inner.devices, like.groups),
        "inner axes": (inner_axes(mesh, axis), like.local.shards.inner),
    }
    _check_rules(rules)
    form = jax.eval_shape(lambda tree: tree, like)
    local = jax.tree.map(lambda x: x.update(shape=x.shape[1:]), form.local.trainable)
    tx = config.inner.step.settings.tx
    _check_optimizer(tx, local.params, local.opt_state, "opt_state")
    for pair in zip(form.shared.anchor, form.shared.outer, strict=True):
        _check_optimizer(config.outer_tx, *pair, "shared.outer")
    # Arrays are restored onto the mesh of `train`, wherever `like` lies.
    own = dataclasses.replace(shared.form, mesh=mesh, axis_name=axis)
    return form._replace(shared=form.shared._replace(form=own))


def check_optimizer_of(train: TrainStep, like: PipelineState) -> None:
    _check_optimizer(train.settings.tx, like.params, like.opt_state, "opt_state")


def _check_rules(rules: dict[str, tuple[Any, Any]]) -> None:
    for name, (wanted, found) in rules.items():
        if wanted != found:
            raise ValueError(
                f"`like` must be a state of `train`, with {name} {wanted}; got {name}"
                f" {found}. {_PASS}"
            )


def _check_optimizer(
    tx: optax.GradientTransformation,
    params: optax.Params,
    opt_state: optax.OptState,
    name: str,
) -> None:
    if found := opt_state_difference(tx, params, opt_state, name):
        path, rule, value = found
        raise ValueError(
            "`train` must have the optimizer that `like` and the checkpoint have states"
            f" of: its own state has `{path}` {rule}; got {value} in its place. Make"
            " the train step with the optimizer that the checkpoint was saved with."
        )


_PASS = "Pass `train.init(params, ...)` or `train.abstract_state(params, ...)`."
