"""Checks the state that a local step is given.

Each error message names the rule, the value and the remedy.
"""

from typing import Any

import jax
from jax.sharding import Mesh

from pipejax._core.checks import check_opt_state
from pipejax._core.rounds import LocalState
from pipejax._core.step import check_not_donated
from pipejax._internal.mesh import inner_axes, is_traced

from ._codec_states import check_none_unused
from ._initial_rounds import round_codec_states
from ._round_config import RoundConfig

_GO_ON = (
    "Drain it with the local step that made it, and go on from"
    " `train.init(state.params)` of this one."
)


def check_rounds(config: RoundConfig, state: LocalState) -> None:
    """Raises a `ValueError` if a state is not one of these rounds."""
    if not isinstance(state, LocalState):
        raise ValueError(
            "`state` must be the pj.LocalState that `train.init` returned, got"
            f" {type(state).__name__}."
        )
    _check_untraced()
    check_not_donated(state)
    mesh, axis = config.inner.mesh, config.inner.axis_name
    rules: dict[str, tuple[Any, Any]] = {
        "inner axes": (state.local.shards.inner, inner_axes(mesh, axis)),
        "groups": (state.groups, config.inner.devices),
        "chunks, as `overlap_steps` says": (
            state.shared.form.chunks,
            config.schedule_of(state.shared.form).chunks,
        ),
    }
    for name, (found, wanted) in rules.items():
        if found != wanted:
            raise ValueError(
                f"`state` must be one of {wanted} {name}; got one of {found}. {_GO_ON}"
            )


def check_round_optimizers(config: RoundConfig, state: LocalState) -> None:
    """Raises a `ValueError` if a state is one of other optimizers."""
    trained, shared = state.local.trainable, state.shared
    # Arrays of a group have a leading axis of groups.
    params, opt_state = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype),
        (trained.params, trained.opt_state),
    )
    tx, name = config.inner.step.settings.tx, "state.local.trainable.opt_state"
    check_opt_state(tx, params, opt_state, name, _GO_ON)
    chunks = zip(shared.anchor, shared.outer, strict=True)
    for number, (anchor, outer) in enumerate(chunks):
        name = f"state.shared.outer[{number}]"
        check_opt_state(config.outer_tx, anchor, outer, name, _GO_ON, "outer_tx")


def check_round_codecs(
    config: RoundConfig, reduction_mesh: Mesh, state: LocalState
) -> None:
    """Raises a `ValueError` if a state holds more than the codecs of a round keep."""
    if any(state.own.codec_states):
        wanted = round_codec_states(config, reduction_mesh, state.shared, abstract=True)
        for pair in zip(state.own.codec_states, wanted, strict=True):
            check_none_unused(*pair)


def _check_untraced() -> None:
    if is_traced():
        raise ValueError(
            "`state` of local steps must not be used inside jit, scan or eval_shape:"
            " its place in a round says, on the host, which program runs; got a call"
            " that is traced. Call `train.step` and `train.drain` outside. They compile"
            " their programs themselves."
        )
