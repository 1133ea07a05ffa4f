"""Continues local steps from the contents of a checkpoint."""

import logging
from typing import Any

import jax
from etils import epath
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pipejax._core.executors import (
    regrouped,
    rescheduled,
    round_codec_states,
    round_shapes,
)
from pipejax._core.rounds import Arrival, GroupState
from pipejax._internal.mesh import auto_mesh
from pipejax._internal.round_schedule import RoundSchedule
from pipejax.train_step import LocalState, LocalTrainStep

from ._check_saved import check_form, check_kind, check_names, check_optimizers
from ._leaves import part_of, zeros
from ._read import Saved, Wanted, rebuilt, warn_of_lost
from ._spread import Spread

# Parts of a state that are sometimes not read, but made anew.
CODECS = "own.codec_states"
REPORTS = "own.reported"
_log = logging.getLogger(__name__)


def wanted_of_rounds(
    train: LocalTrainStep, like: LocalState, path: epath.Path, meta: dict[str, Any]
) -> Wanted:
    """Returns the part of a checkpoint that `train` continues from.

    Raises a `ValueError` if the checkpoint has other rounds, shards or forms.
    """
    check_kind(path, meta, rounds=True)
    config, schedule = train.rounds.config, RoundSchedule(*meta["schedule"])
    if config.schedule is None:
        like = like._replace(shared=rescheduled(config, like.shared, schedule))
    placed = _placed(train, like)
    before, now = Spread(**meta["spread"]), Spread.of_rounds(placed)
    rules = {
        "chunks, as `overlap_steps` says,": (schedule.chunks, like.shared.form.chunks),
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
    under_way = meta["rounds"]["reported"] > 0
    check_names(path, meta["passengers"] if under_way else None, like, _GO_ON)
    same = before.same_codecs(now, config.inner.all_reduce)
    # With nothing under way, the loss function may be another.
    anew = (*(() if same else (CODECS,)), *(() if under_way else (REPORTS,)))
    own: Any = placed.own if same else placed.own._replace(codec_states=())
    if not under_way:
        own = own._replace(reported=None)
    if before.devices != now.devices:
        own = _on_all_groups(train, own, before.devices)
    form = placed._replace(own=own)
    saved = {k: v for k, v in meta["leaves"].items() if not part_of(k, anew)}
    check_form(path, saved, form)
    check_optimizers(path, meta, like)
    numbers = {f"position.{name}": n for name, n in meta["rounds"].items()}
    return Wanted(form, numbers, before, anew)


def rounds_state(
    train: LocalTrainStep, like: LocalState, saved: Saved
) -> tuple[LocalState, bool, tuple[Arrival, ...]]:
    """Returns the state, whether it was drained, and the reports of the drain.

    `like` has the shapes of the state.
    """
    state, before, anew = rebuilt(saved), saved.wanted.before.devices, saved.wanted.anew
    config, mesh = train.rounds.config, train.rounds.executor.reduction_mesh
    moved = before != config.inner.devices
    if CODECS in anew:
        warn_of_lost(saved, CODECS)
    if CODECS in anew and not moved:
        states = round_codec_states(config, mesh, state.shared, abstract=False)
        state = state._replace(own=state.own._replace(codec_states=states))
    if REPORTS in anew:
        form = _placed(train, like).own
        form = _on_all_groups(train, form, before) if moved else form
        places = jax.tree.map(lambda shape: shape.sharding, form.reported)
        reported = zeros(form.reported, places)
        state = state._replace(own=state.own._replace(reported=reported))
    if not moved:
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


def _on_all_groups(train: LocalTrainStep, own: GroupState, before: int) -> Any:
    """Returns the shapes of what `before` groups have, all of it on every group."""
    groups, mesh = train.rounds.config.inner.devices, auto_mesh(train.mesh)

    def of_all(leaf: Any) -> jax.ShapeDtypeStruct:
        length = leaf.shape[0] // groups * before
        # Inside a group, arrays stay as its devices shard them.
        whole = NamedSharding(mesh, P(None, *leaf.sharding.spec[1:]))
        return leaf.update(shape=(length, *leaf.shape[1:]), sharding=whole)

    return jax.tree.map(of_all, own)


_GO_ON = (
    "Then drain it, and call `train.init(state.params, model_state=state.model_state,"
    " batch=batch)` of the new local step."
)
