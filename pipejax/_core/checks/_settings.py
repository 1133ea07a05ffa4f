"""Checks the arguments of `make_train_step` before anything is traced.

Each error message names the argument, the rule, the value and the remedy.
"""

import dataclasses
import functools
import operator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from pipejax._internal.integers import is_integer
from pipejax._internal.mesh import AxisName, axes, is_attached, size_along
from pipejax.codecs import Codec, Linear
from pipejax.collectives import AllReduce, Schedule, has_reduce_scatter


def check_width(width: int) -> int:
    """Returns `width` as an int, or raises a `ValueError` unless it is at least 1."""
    if not is_integer(width, 1):
        raise ValueError(
            f"`width` must be an integer of at least 1, got {width!r}. 1 is synchronous"
            " (D-Sync), 2 hides the all-reduce of one step behind the next."
        )
    return operator.index(width)


def check_count(name: str, value: int, least: int) -> int:
    """Returns `value` as an int, or raises a `ValueError` if it is below `least`."""
    if not is_integer(value, least):
        raise ValueError(
            f"`{name}` must be an integer of at least {least}, got {value!r}."
        )
    return operator.index(value)


def check_flag(name: str, value: bool) -> bool:
    """Returns `value`, or raises a `ValueError` if it is not a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"`{name}` must be True or False, got {value!r}.")
    return value


def check_prediction(rule: Any) -> Literal["linearized", "own", False]:
    """Returns the rule of prediction, of which `True` is the default."""
    if rule is False:
        return False
    if rule is True or rule == "linearized":
        return "linearized"
    if rule == "own":
        return "own"
    raise ValueError(
        "`weight_prediction` must be 'linearized', 'own' or False, got"
        f" {rule!r}. 'linearized' predicts with the last mean gradient and the own one,"
        " 'own' with the own gradient alone, and False takes a plain delay."
    )


def check_delayed(delayed: Any, width: int, *, sharded: bool) -> Any:
    """Returns `delayed`, or `None` where every gradient has the same delay.

    Raises a `ValueError` for some delayed gradients with a sharded optimizer.
    """
    if delayed is None or width == 1:
        return None
    if sharded:
        raise ValueError(
            "`delayed` must be None with shard_optimizer=True, got"
            f" {delayed!r}: the update of a sharded optimizer is part of the exchange,"
            " and needs all gradients at once. Leave out one of the two."
        )
    return delayed


def check_at_once(
    at_once: Any, delayed: Any, width: int, *, sharded: bool
) -> Linear | None:
    """Returns the codec `at_once`, or `None` where nothing is delayed.

    Raises a `ValueError` if it is not a linear codec, or has error feedback. It is also
    an error to combine it with `delayed` or with a sharded optimizer.
    """
    if at_once is None:
        return None
    # The rest is delayed, so the codec must neither scale what it keeps nor send the
    # rest by itself. Both kinds of codec need no error feedback.
    if not isinstance(at_once, Linear) or not at_once.needs_feedback:
        raise ValueError(
            "`at_once` must be a linear codec that keeps a part of the gradients, and"
            f" must have no error feedback: the rest is sent anyway; got {at_once!r}."
            " Choose pj.codecs.power_sgd(16, key)."
        )
    if width == 1:
        return None
    if sharded or delayed is not None:
        other = "shard_optimizer=True" if sharded else "`delayed`"
        raise ValueError(
            f"`at_once` must be None with {other}, got {at_once!r}. Leave out one of"
            " the two."
        )
    return at_once


def check_gather_codec(codec: Any, devices: int, *, sharded: bool) -> Codec | None:
    """Returns the codec, or `None` where one device has all pieces.

    Raises a `ValueError` if the codec cannot encode pieces.
    """
    if codec is None:
        return None
    if not sharded:
        raise ValueError(
            "`gather_codec` must be None without shard_optimizer=True, where nothing is"
            f" gathered; got {codec!r}. A codec of gradients belongs to the all-reduce:"
            " all_reduce=pj.collectives.two_shot(codec)."
        )
    valid = isinstance(codec, Codec) and not (
        codec.needs_leaves or codec.needs_feedback
    )
    if not valid or jax.tree.leaves(
        jax.eval_shape(functools.partial(codec.init, codec.multiple), np.uint32(0))
    ):
        raise ValueError(
            "`gather_codec` must be a codec that rounds each element to the nearest"
            " level, and keeps no state: what it loses is in the next difference, so"
            f" that it needs no error feedback; got {codec!r}. Choose pj.codecs.int4()."
        )
    return codec if devices > 1 else None


def check_floating(name: str, dtype: DTypeLike | None) -> DTypeLike | None:
    """Returns `dtype`, or raises a `ValueError` unless it is floating or `None`."""
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"`{name}` must be a floating dtype or None, got {dtype!r}. Choose"
            " jnp.bfloat16 or jnp.float32."
        )
    return dtype


def check_executor(name: str) -> str:
    """Returns `name`, or raises a `ValueError` if there is no executor of that name."""
    if name not in ("auto", "fused", "host"):
        raise ValueError(
            f"`executor` must be 'auto', 'fused' or 'host', got {name!r}. 'auto' takes"
            " the one that hides communication on the mesh's devices."
        )
    return name


def check_all_reduce(
    all_reduce: Any, axis_name: AxisName, several: bool = True
) -> Schedule:
    """Returns the argument `all_reduce` as a schedule of one algorithm or more."""
    schedule = all_reduce
    if isinstance(all_reduce, AllReduce):
        schedule = Schedule((all_reduce,))
    elif isinstance(all_reduce, Schedule) and not several:
        raise ValueError(
            "`all_reduce` must be one algorithm inside a program: which of several runs"
            " is decided between steps; got pj.collectives.scheduled(...). Use"
            " pj.make_train_step, or make one step for each and choose."
        )
    if not isinstance(schedule, Schedule):
        raise ValueError(
            "`all_reduce` must be an algorithm such as pj.collectives.psum(), called,"
            f" or pj.collectives.scheduled(...); got {all_reduce!r}."
        )
    for phase in schedule.phases:
        phase.check_axes(axis_name)
    return schedule


def check_of_chunks(all_reduce: AllReduce) -> AllReduce:
    """Returns an algorithm; raises a `ValueError` if its codec needs whole arrays."""
    for field in dataclasses.fields(all_reduce):
        part = getattr(all_reduce, field.name)
        if isinstance(part, AllReduce):
            check_of_chunks(part)
        if isinstance(part, Codec) and part.needs_leaves:
            raise ValueError(
                "`all_reduce` must have a codec that compresses vectors, because chunks"
                f" of parameters are vectors; got {part!r:.200}. For example"
                " pj.collectives.two_shot(pj.codecs.error_feedback(pj.codecs.int4()))."
            )
    return all_reduce


def check_tx(tx: Any, name: str = "tx") -> Any:
    """Returns `tx`, or raises a `ValueError` if it is not an Optax transformation."""
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise ValueError(
            f"`{name}` must be an optax.GradientTransformation, with `init` and"
            f" `update`; got {type(tx).__name__}. For example optax.sgd(0.1)."
        )
    try:
        hash(tx)
    except TypeError:  # a dataclass, or one that holds arrays
        return optax.GradientTransformationExtraArgs(tx.init, tx.update)
    return tx


def check_axis_name(axis_name: Any) -> AxisName:
    """Returns `axis_name`, or raises a `ValueError` unless it names distinct axes."""
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    valid = isinstance(names, tuple) and all(isinstance(n, str) for n in names)
    if not valid or not names or len(set(names)) < len(names):
        raise ValueError(
            "`axis_name` must be the name of a mesh axis, or a tuple of distinct names;"
            f" got {axis_name!r}. Gradients are averaged over these axes: 'data', or"
            " ('host', 'device')."
        )
    return axis_name


def check_mesh(mesh: Mesh, axis_name: AxisName) -> Mesh:
    """Returns `mesh`, or raises a `ValueError` if a train step cannot run on it."""
    if not isinstance(mesh, Mesh):
        raise ValueError(
            f"`mesh` must be a jax.sharding.Mesh, got {type(mesh).__name__}. Use"
            " pj.data_mesh()."
        )
    if not set(axes(axis_name)) <= set(mesh.axis_names):
        raise ValueError(
            f"`mesh` must have the axis {axis_name!r}, got the axes"
            f" {tuple(mesh.axis_names)}. Use pj.data_mesh(), or name the axis of the"
            " data: `axis_name=...`."
        )
    there = {device.process_index for device in mesh.devices.flat}
    left_out = {*range(jax.process_count())} - there
    if left_out and is_attached(mesh):
        raise ValueError(
            f"`mesh` must have devices of all {jax.process_count()} processes of this"
            f" job, got none of process {', '.join(map(str, sorted(left_out)))}. Use"
            " pj.data_mesh(), or start as many processes as are to train."
        )
    return mesh


def check_sharded_optimizer(
    schedule: Schedule,
    mesh: Mesh,
    axis_name: AxisName,
    rule: Literal["linearized", "own", False],
    executor: str,
) -> None:
    """Raises a `ValueError` unless the settings allow a sharded optimizer."""
    platform = mesh.devices.flat[0].platform
    if executor == "host" and platform != "cpu":
        raise ValueError(
            "`executor` must be 'fused' or 'auto' with shard_optimizer=True on"
            f" accelerators, whose pieces of the optimizer stay on them; got 'host' on"
            f" {platform}."
        )
    if rule == "own":
        raise ValueError(
            "`weight_prediction` must be 'linearized' or False with"
            " shard_optimizer=True, where no device has the optimizer state by which to"
            " apply its own gradients; got 'own'."
        )
    devices = size_along(mesh, axis_name)
    for all_reduce in schedule.phases:
        if not has_reduce_scatter(all_reduce, devices):
            raise ValueError(
                "`all_reduce` must have two halves with shard_optimizer=True, between"
                " which every device has a piece of the sums: psum() without a codec,"
                " two_shot, ring, or on a power of two of devices halving_doubling;"
                f" got {all_reduce} on {devices} devices."
            )
