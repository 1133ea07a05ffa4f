"""Describes a checkpoint in its own files, so that damage to any part of it shows.

Beside the arrays, a checkpoint has two JSON files: `extras`, and `meta` with the step,
the form of the state, what is in flight, the checksum of each array, the digest of the
extras, and a digest of all of this. Parts of different checkpoints therefore never pass
for one.
"""

import dataclasses
import hashlib
import json
from typing import Any

import jax
import optax
from etils import epath

from pipejax._core.message import count, width_of
from pipejax._internal.structures import containers
from pipejax._internal.types import Tree
from pipejax.train_step import LocalState, PipelineState

from ._fault import DamagedError
from ._leaves import form, is_weak, named
from ._spread import Spread

_DIGEST = "digest"
_VERSION = 2  # of what this module writes


def meta_of(
    state: PipelineState | LocalState,
    step: int,
    extras: dict[str, Any],
    sums: dict[str, str],
) -> dict[str, Any]:
    leaves = named(state)
    meta = {
        "version": _VERSION,
        "step": step,
        **(_of_rounds(state) if isinstance(state, LocalState) else _of_pipeline(state)),
        "leaves": {name: form(leaf) for name, leaf in leaves.items()},
        "optimizers": optimizers_of(state),
        "weak": [name for name, leaf in leaves.items() if is_weak(leaf)],
        "checksums": sums,
        "extras": digest(extras),
    }
    return meta | {_DIGEST: digest(meta)}


def _of_pipeline(state: PipelineState) -> dict[str, Any]:
    return {
        "width": width_of(state.in_flight),
        "in_flight": count(state.in_flight),
        "passengers": passengers_of(state),
        "spread": Spread.of(state)._asdict(),
        "calls": None if state.calls is None else int(state.calls),
    }


def _of_rounds(state: LocalState) -> dict[str, Any]:
    return {
        "rounds": {name: int(n) for name, n in state.position._asdict().items()},
        "schedule": [int(n) for n in dataclasses.astuple(state.shared.form.schedule)],
        "passengers": passengers_of(state),
        "spread": Spread.of_rounds(state)._asdict(),
    }


def passengers_of(state: PipelineState | LocalState) -> list[str]:
    """Returns the names of what travels with gradients, or with a round."""
    if isinstance(state, LocalState):
        return state.own.reported.names
    return [name for x in state.in_flight.pending[:1] for name in x.passengers.names]


def optimizers_of(state: PipelineState | LocalState) -> list[str]:
    """Returns the types that the states of all optimizers are made of, as text."""
    if isinstance(state, LocalState):
        trained, shared = state.local.trainable, state.shared
        outer = _types(shared.outer[0], shared.anchor[0])
        return [_types(trained.opt_state, trained.params), outer]
    return [_types(state.opt_state, state.params)]


def _types(opt_state: optax.OptState, params: Tree) -> str:
    """Returns the types of an optimizer state, without those of parameters in it."""
    like: Any = jax.tree.structure(params)

    def is_like(node: Any) -> bool:
        return bool(jax.tree.structure(node) == like)

    return containers(jax.tree.map(lambda _: 0, opt_state, is_leaf=is_like))


def read(path: epath.Path) -> tuple[dict[str, Any], dict[str, Any]]:
    return _read(path, "meta"), _read(path, "extras")


def check_version(path: epath.Path, meta: dict[str, Any]) -> None:
    if meta.get("version") != _VERSION:
        raise ValueError(
            f"the checkpoint in {path} must have the form that this version of pipejax"
            f" writes, {_VERSION}; got {meta.get('version', 'that of an earlier one')}."
            " Continue with the version that saved it, or start a new run from the"
            " parameters in the checkpoint."
        )


def check_whole(meta: dict[str, Any], extras: dict[str, Any], step: int) -> None:
    rest = {name: value for name, value in meta.items() if name != _DIGEST}
    if meta.get(_DIGEST) != digest(rest):
        raise DamagedError("`meta` is not what was saved")
    if meta["step"] != step:
        raise DamagedError(f"its contents are those of step {meta['step']}")
    if meta["extras"] != digest(extras):
        raise DamagedError("`extras` are not what was saved")


def digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _read(path: epath.Path, item: str) -> dict[str, Any]:
    file = path / item / "metadata"
    if not file.exists():
        raise DamagedError(
            f"`{item}` is missing, unless another program has written the checkpoint"
        )
    try:
        found = json.loads(file.read_bytes())
    except ValueError as error:
        raise DamagedError(f"`{item}` cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise DamagedError(f"`{item}` must be an object, and is {type(found).__name__}")
    return found
