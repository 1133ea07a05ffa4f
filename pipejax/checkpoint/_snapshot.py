"""Keeps a state in host memory, from time to time."""

from typing import Any

import jax
import orbax.checkpoint as ocp

from pipejax._internal.mesh import without_mesh
from pipejax.train_step import LocalState, PipelineState

from ._extras import packed
from ._leaves import encoded
from ._manager import check_manager, keeper_of
from ._meta import meta_of
from ._save import check_state, on_devices, step_of
from ._snapshots import Taken


def snapshot(
    manager: ocp.CheckpointManager,
    state: PipelineState | LocalState,
    extras: dict[str, Any] | None = None,
) -> bool:
    r"""Keeps a state in host memory, if it is time to do so.

    Call it after every step, on every process. Process 0 decides at which steps all
    processes copy their blocks of the state into the folder that the manager was given
    as `memory`. The copy stops the training; checksums, and a copy of the blocks on
    another host, are made beside the steps that follow. `restore` takes the newest
    snapshot that all processes have, if it is of a later step than the newest
    checkpoint: from the memory of the process's own host, or, if that host was lost,
    from the other.

    With the seconds C for which a copy stops the training, those B that it takes beside
    it, and the mean seconds M from one fault to the next, there are at least

    $$\max(C / 0.01, \; \sqrt{2 (C + B / 5) M})$$

    seconds between two snapshots, where C and B are measured: the smallest of the last
    three snapshots, each the largest of all processes. The first term bounds the share
    of the time for which copies stop the training. The second is Young's optimum
    (Communications of the ACM 17(9), 1974), for which a second of copying beside the
    training is taken to cost a fifth of a second. M is an hour divided by the variable
    `PIPEJAX_FAULTS_PER_HOUR`, which `pipejax launch` sets to what the job has seen, and
    a day without it.

    A snapshot counts once all processes have it. A process keeps two, in turn, and also
    two of what it copies for another host. If there is no room for them, or one of them
    fails, a log record of level WARNING says so, and there are no more.

    Args:
      manager: A manager with `memory`.
      state: A state that `train.init`, `train.step` or `train.drain` has returned.
      extras: A dict to keep with the state, as in `save`: the same on all processes,
        apart from values in a `PerProcess`.

    Returns:
      Whether this call has copied the state.

    Raises:
      ValueError: If `manager` is closed or has no `memory`; if `state` is traced,
        donated or not on all processes; if JSON would change `extras`; or if there are
        later snapshots of this job, and no state was restored.
    """
    check_manager(manager)
    if (keeper := keeper_of(manager)) is None:
        raise ValueError(
            "`manager` must have a folder for snapshots, got one without `memory`. Make"
            " it with pipejax.checkpoint.manager(folder, memory='/dev/shm')."
        )
    if not keeper.is_due():
        return False
    check_state(state)
    shared, own = packed({} if extras is None else extras)

    def taken() -> Taken:
        step = step_of(state)
        newest = keeper.newest()
        if newest is not None and step <= newest:
            raise ValueError(
                "`state` must be of a later step than the snapshots in"
                f" {keeper.memory.path}, got step {step} where the newest is of step"
                f" {newest}. Restore it first, or begin in another folder of"
                " checkpoints."
            )
        leaves = on_devices(state).items()
        arrays = {name: encoded(leaf) for name, leaf in leaves if leaf.size}
        return Taken(step, meta_of(state, step, shared, {}), shared, own, arrays)

    # The caller has asked for the transfer of the state to the host.
    with without_mesh(), jax.transfer_guard("allow"):
        return keeper.copy(taken)
