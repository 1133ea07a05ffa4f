"""Checks that a checkpoint can be continued by a train step, before it is read.

Each error message names the checkpoint, the rule, the value and the remedy.
"""

from typing import Any

from etils import epath

from pipejax._internal.types import Tree
from pipejax.train_step import LocalState, PipelineState, TrainStep

from ._leaves import GATHERED, Form, form, named, part_of
from ._meta import optimizers_of, passengers_of


def check_kind(path: epath.Path, meta: dict[str, Any], *, rounds: bool) -> None:
    """Raises a `ValueError` if local steps read the state of a pipeline, or back."""
    names = {True: "pj.make_local_step", False: "pj.make_train_step"}
    if ("rounds" in meta) != rounds:
        raise ValueError(
            f"`train` must be made by {names[not rounds]}, as the one that saved the"
            f" checkpoint in {path}; got one of {names[rounds]}. Restore it with such a"
            " one, drain it, and call `train.init(state.params)` of the new one."
        )


def check_train(
    path: epath.Path, meta: dict[str, Any], train: TrainStep, like: PipelineState
) -> None:
    rules = {"width": (meta["width"], train.width)}
    if 1 not in (meta["spread"]["devices"], train.config.devices):
        # A single device divides nothing, whether or not its optimizer is sharded.
        saved = any(part_of(name, (GATHERED,)) for name in meta["leaves"])
        rules["shard_optimizer"] = saved, like.trainable.gathered is not None
    for name, (was, now) in rules.items():
        if was != now:
            raise ValueError(
                f"`train` must have {name}={was}, as the train step that saved the"
                f" checkpoint in {path}; got {name}={now}. To change it, restore the"
                f" checkpoint with {name}={was}. {_GO_ON}"
                + (_WHOLE if name == "shard_optimizer" and was else "")
            )


_GO_ON = (
    "Then drain it with `state, _ = train.drain(state)`, and call"
    " `train.init(state.params, model_state=state.model_state, rng=state.rng,"
    " opt_state=state.opt_state, batch=batch)` of the new train step."
)


_WHOLE = (
    " Before that, gather parameters and optimizer state: `train.whole_params(state)`"
    " in place of `state.params`, and `jax.device_put(state.opt_state,"
    " NamedSharding(train.mesh, P()))`."
)


def check_passengers(
    path: epath.Path, meta: dict[str, Any], like: PipelineState
) -> None:
    saved = meta["passengers"] if meta["in_flight"] else None
    check_names(path, saved, like, _GO_ON)


def check_names(
    path: epath.Path,
    saved: list[str] | None,
    like: PipelineState | LocalState,
    go_on: str,
) -> None:
    """Raises a `ValueError` if `like` has no room for the names in flight."""
    wanted = passengers_of(like)
    if saved is not None and saved != wanted:
        raise ValueError(
            f"`like` must be of the loss function that the checkpoint in {path} was"
            f" saved with, because what it returned is in flight: {saved}; got"
            f" {wanted}. If the loss function is the same, give `batch=` to"
            " `train.init` or `train.abstract_state`. To change it, save a state that"
            " was drained, `state, _ = train.drain(state)`, or restore the checkpoint"
            f" with the old loss function. {go_on}"
        )


def check_optimizers(
    path: epath.Path, meta: dict[str, Any], like: PipelineState | LocalState
) -> None:
    """Raises a `ValueError` if the states in a checkpoint are of other optimizers."""
    for was, now in zip(meta["optimizers"], optimizers_of(like), strict=True):
        if was != now:
            raise ValueError(
                "`train` must have the optimizer that the checkpoint has a state of:"
                f" the one in {path} is made of {was:.200}; got one of {now:.200}. To"
                " change it, restore the checkpoint with the old optimizer, drain it,"
                " and call `train.init(state.params)` of a train step with the new one."
            )


def check_form(path: epath.Path, saved: dict[str, Any], target: Tree) -> None:
    found = differing(saved, target)
    if found:
        name, (there, wanted) = next(iter(found.items()))
        raise ValueError(
            f"`like` must have the form of the checkpoint in {path}: {len(found)} of"
            f" {len(saved.keys() | named(target))} leaves differ, the first is {name}:"
            f" saved {_said(there)}, wanted {_said(wanted)}. Restore it with the model,"
            " optimizer and options that it was saved with."
        )


def differing(
    saved: dict[str, Any], target: Tree
) -> dict[str, tuple[Form | None, Form | None]]:
    """Returns the saved and the wanted form of each leaf where the two differ."""
    wanted = {name: form(leaf) for name, leaf in named(target).items()}
    there = {name: (tuple(shape), dtype) for name, (shape, dtype) in saved.items()}
    both = {name: (there.get(name), wanted.get(name)) for name in wanted | there}
    return {name: forms for name, forms in both.items() if forms[0] != forms[1]}


def _said(form: Form | None) -> str:
    """Returns a leaf's form as JAX writes it, such as `float32[5,7]`."""
    if form is None:
        return "none"
    shape, dtype = form
    return f"{dtype}[{','.join(map(str, shape))}]"
