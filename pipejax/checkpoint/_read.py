"""Reads the checkpoint of one step, and checks every part of it."""

import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pipejax._internal.checksums import checksums
from pipejax._internal.types import Tree

from ._fault import DamagedError, Fault, attempt
from ._leaves import decoded, empty, encoded, named, part_of, weakened
from ._meta import check_version, check_whole, read
from ._spread import Spread

_log = logging.getLogger(__name__)


class Wanted(NamedTuple):
    """The part of a checkpoint that is read, as a train step wants it.

    Attributes:
      form: Shapes, dtypes and shardings of the arrays, in the structure of a state.
      numbers: The leaves of `form` that are kept on the host, by name.
      before: The devices or groups whose arrays these are.
      anew: The parts of a state that are not read, but made anew.
    """

    form: Tree
    numbers: dict[str, int]
    before: Spread
    anew: tuple[str, ...]


class Saved(NamedTuple):
    """The contents of a whole checkpoint.

    Attributes:
      arrays: The arrays that are wanted, by name.
      extras: The extras that `save` was given.
      meta: What `save` has written about the state.
    """

    arrays: dict[str, jax.Array]
    extras: dict[str, Any]
    meta: dict[str, Any]
    wanted: Wanted


Choose = Callable[[epath.Path, dict[str, Any]], Wanted]
"""From the folder of a checkpoint and what was written about its state to the part that
is read. It raises a `ValueError` if a train step cannot continue from it."""


def read_step(
    manager: ocp.CheckpointManager, choose: Choose, step: int
) -> Saved | Fault:
    """Reads a checkpoint; returns its contents, or a fault on all processes.

    Raises a `ValueError` if the checkpoint is of another version or form.
    """
    path = manager.directory / str(step)
    found = attempt(lambda: read(path))
    if isinstance(found, Fault):
        return found
    meta, extras = found
    if fault := attempt(lambda: check_whole(meta, extras, step)):
        return fault
    check_version(path, meta)
    wanted = choose(path, meta)
    shapes = written(wanted)
    arrays = attempt(lambda: _arrays(path, solid(shapes)))
    if isinstance(arrays, Fault):
        return arrays
    found_sums = checksums(arrays, every_copy=True)
    if fault := attempt(lambda: _check_sums(found_sums, meta["checksums"])):
        return fault
    return Saved(with_empty(shapes, arrays), extras, meta, wanted)


def rebuilt(saved: Saved) -> Any:
    """Returns the arrays of a checkpoint in the structure of a state."""
    form, arrays = saved.wanted.form, saved.arrays
    leaves: dict[str, Any] = {
        name: decoded(arrays[name], leaf) if name in arrays else None
        for name, leaf in named(form).items()
    }
    weak = (name for name in saved.meta["weak"] if name in arrays)
    leaves |= {name: weakened(leaves[name]) for name in weak}
    leaves |= {name: np.int32(n) for name, n in saved.wanted.numbers.items()}
    return jax.tree.unflatten(jax.tree.structure(form), leaves.values())


def warn_of_lost(saved: Saved, part: str) -> None:
    """Logs which codec states, the `part` of a state, are not restored."""
    if lost := [name for name in saved.meta["leaves"] if part_of(name, (part,))]:
        _log.warning(
            "checkpoint of other devices, or of other shards of the model: residuals of"
            " error feedback start from zero, and PRNG keys and warm starts of codecs"
            " begin anew. Not restored: %s",
            ", ".join(lost),
        )


def written(wanted: Wanted) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shape, dtype and sharding of each array as it is written, by name."""
    leaves = {k: v for k, v in named(wanted.form).items() if k not in wanted.numbers}
    shapes = jax.eval_shape(functools.partial(jax.tree.map, encoded), leaves)
    # JAX replicates arrays without elements.
    return {
        name: shape.update(
            sharding=leaves[name].sharding
            if shape.size
            else NamedSharding(leaves[name].sharding.mesh, P())
        )
        for name, shape in shapes.items()
    }


def solid(shapes: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of arrays that have elements."""
    return {name: shape for name, shape in shapes.items() if shape.size}


def with_empty(
    shapes: dict[str, jax.ShapeDtypeStruct], arrays: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    """Returns arrays of all shapes, also of those without elements."""
    return {k: arrays[k] if v.size else empty(v) for k, v in shapes.items()}


def _arrays(path: Any, shapes: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    args = ocp.args.PyTreeRestore(
        item=shapes,
        restore_args=ocp.checkpoint_utils.construct_restore_args(shapes),
        partial_restore=True,
    )
    # At a barrier of a manager, other processes would wait for one that fails.
    arrays = ocp.PyTreeCheckpointHandler().restore(path / "state", args=args)
    if missing := [name for name in shapes if name not in arrays]:
        raise DamagedError(f"{missing[0]} is missing")
    return jax.block_until_ready(arrays)


def _check_sums(found: dict[str, str], saved: dict[str, str]) -> None:
    names = [name for name in found if found[name] != saved.get(name)]
    if names:
        raise DamagedError(
            f"{len(names)} of {len(found)} leaves are not what was saved, the first is"
            f" {names[0]}"
        )
