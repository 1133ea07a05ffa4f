"""Continues local steps from the contents of a checkpoint."""

import logging
from typing import Any

import jax
from etils import epath
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pipejax._core.executors import regrouped, round_codec_states, round_shapes
from pipejax._core.rounds import Arrival
from pipejax.train_step import LocalState, LocalTrainStep

from ._check_saved import check_form, check_kind, check_names
from ._leaves import part_of
from ._pipeline_state import zeros
from ._read import Saved, Wanted, rebuilt
from ._spread import Spread

# Parts of a state that are sometimes not read, but made anew.
CODECS = "own.codec_states"
REPORTS = "own.reported", "own.sent"
_log = logging.getLogger(__name__)


def wanted_of_rounds(
    train: LocalTrainStep, like: LocalState, path: epath.Path, meta: dict[str, Any]
) -> Wanted:
    """Returns the part of a checkpoint that `train` continues from.

    Raises a `ValueError` if the checkpoint has other rounds, shards or forms.
    """
    check_kind(path, meta, rounds=True)
    placed = _placed(train, like)
    before, now = Spread(**meta["spread"]), Spread.of_rounds(placed)
    taken, config = meta["rounds"]["taken"], train.rounds.config
    rules = {
        "chunks, as `overlap_steps` says,": (meta["chunks"], config.chunks),
        "inner axes": (before.inner, now.inner),
        "a split of parameters": (before.split, now.split),
    }
    for name, (was, wanted) in rules.items():
        if was != wanted:
            raise ValueError(
                f"`train` must have {name} of {was}, as the local step that saved the"
                f" checkpoint in {path}; got {wanted}. To change this, restore it with"
                " what it was saved with, drain it, and call"
                " `train.init(state.params)` of the new local step."
            )
    if taken >= config.sync_every:
        raise ValueError(
            f"`train` must have a `sync_every` above {taken}, the steps that the"
            f" checkpoint in {path} has taken in its round; got {config.sync_every}."
            " To change it, restore the checkpoint with its old value and drain it."
        )
    moves = meta["rounds"]["taken"] or meta["rounds"]["left"]
    check_names(path, meta["passengers"] if moves else None, like, _GO_ON)
    same = before.same_codecs(now, config.inner.all_reduce)
    anew: tuple[str, ...] = () if same else (CODECS,)
    # With nothing in flight, the loss function may be another.
    anew += () if moves else REPORTS
    nothing: Any = None
    if CODECS in anew:
        placed = placed._replace(own=placed.own._replace(codec_states=()))
    if not moves:
        placed = placed._replace(
            own=placed.own._replace(reported=nothing, sent=nothing)
        )
    if before.devices != now.devices:
        placed = placed._replace(own=_of_groups(placed, before.devices))
    saved = {k: v for k, v in meta["leaves"].items() if not part_of(k, anew)}
    check_form(path, saved, placed)
    numbers = {f"position.{name}": n for name, n in meta["rounds"].items()}
    return Wanted(placed, numbers, before.devices, anew)


def rounds_state(
    train: LocalTrainStep, like: LocalState, saved: Saved
) -> tuple[LocalState, bool, tuple[Arrival, ...]]:
    """Returns the state, whether it was drained, and the reports of the drain.

    `like` has the shapes of the state.
    """
    state, before = rebuilt(saved), saved.wanted.devices
    config, mesh = train.rounds.config, train.rounds.executor.reduction_mesh
    codecs = tuple(part for part in saved.wanted.anew if part == CODECS)
    if lost := [name for name in saved.meta["leaves"] if part_of(name, codecs)]:
        _log.warning(
            "checkpoint of other devices: residuals of error feedback start from zero,"
            " and PRNG keys and warm starts of codecs begin anew. Not restored: %s",
            ", ".join(lost),
        )
    if state.own.reported is None:
        placed = _placed(train, like)
        same = before == config.inner.devices
        form = placed.own if same else _of_groups(placed, before)
        state = state._replace(
            own=state.own._replace(reported=zeros(form.reported), sent=zeros(form.sent))
        )
    if before == config.inner.devices:
        if codecs:
            states = round_codec_states(config, mesh, state.shared, abstract=False)
            state = state._replace(own=state.own._replace(codec_states=states))
        return state, False, ()
    _log.warning(
        "checkpoint of %d groups restored on %d: all exchange what they have changed",
        before,
        config.inner.devices,
    )
    state, reports = regrouped(config, mesh, state, before)
    return state, True, reports


def _placed(train: LocalTrainStep, like: LocalState) -> LocalState:
    """Returns the shapes of a state with the shardings that `train` gives them."""
    config, mesh = train.rounds.config, train.rounds.executor.reduction_mesh
    shared, own = round_shapes(config, like.shared, like.own)
    states = round_codec_states(config, mesh, shared, abstract=True)
    return LocalState(shared, own._replace(codec_states=states), like.position)


def _of_groups(state: LocalState, before: int) -> Any:
    """Returns the shapes of what all `before` groups have, on every group."""
    mesh = jax.tree.leaves(state.shared.anchor)[0].sharding.mesh
    whole = NamedSharding(mesh, P())

    def of_all(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        length = leaf.shape[0] // state.groups * before
        return leaf.update(shape=(length, *leaf.shape[1:]), sharding=whole)

    return jax.tree.map(of_all, state.own)


_GO_ON = (
    "Then drain it, and call `train.init(state.params, model_state=state.model_state,"
    " batch=batch)` of the new local step."
)
