"""What a user may get wrong, checked in Python before anything is traced.

Each message names the argument, the rule, the value and the remedy.
"""

import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from pipejax import buckets
from pipejax.collectives import AllReduce, Schedule
from pipejax.collectives._all_reduce import check_axes
from pipejax.integers import is_integer
from pipejax.mesh import AxisName, axes
from pipejax.pipeline import PipelinedMeanState, lengths_of, width_of

from ._state import PipelineState


def check_width(width: int) -> int:
    """`width` as an int of at least 1, else a ValueError."""
    if not is_integer(width, 1):
        raise ValueError(
            f"`width` must be an integer of at least 1, got {width!r}. 1 is synchronous"
            " (D-Sync), 2 hides the all-reduce of one step behind the next."
        )
    return operator.index(width)


def check_count(name: str, value: int, least: int) -> int:
    """`value` as an int of at least `least`, else a ValueError."""
    if not is_integer(value, least):
        raise ValueError(
            f"`{name}` must be an integer of at least {least}, got {value!r}."
        )
    return operator.index(value)


def check_flag(name: str, value: bool) -> bool:
    """`value`, or a ValueError if it is not a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"`{name}` must be True or False, got {value!r}.")
    return value


def check_feedback(share: float, weight_prediction: bool) -> float:
    """`share` as a float from 0 to below 1, and 0 without weight prediction."""
    real = isinstance(share, int | float) and not isinstance(share, bool)
    if not real or not 0 <= share < 1:
        raise ValueError(
            f"`deviation_feedback` must be a number from 0 to below 1, got {share!r}."
            " 0.5 is the best at width 2."
        )
    if share and not weight_prediction:
        raise ValueError(
            "`deviation_feedback` must be 0 with weight_prediction=False, which"
            f" predicts nothing that it could mend; got {share!r}."
        )
    return float(share)


def check_floating(name: str, dtype: DTypeLike | None) -> DTypeLike | None:
    """`dtype`, or a ValueError if it is not a floating one."""
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"`{name}` must be a floating dtype or None, got {dtype!r}. Choose"
            " jnp.bfloat16 or jnp.float32."
        )
    return dtype


def check_executor(name: str) -> str:
    """`name`, or a ValueError if there is no such executor."""
    if name not in ("auto", "fused", "host"):
        raise ValueError(
            f"`executor` must be 'auto', 'fused' or 'host', got {name!r}. 'auto' takes"
            " the one that hides communication on the mesh's devices."
        )
    return name


def check_all_reduce(
    all_reduce: Any, axis_name: AxisName, several: bool = True
) -> Schedule:
    """One algorithm or more, or a ValueError if it is none, or not for these axes."""
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
        check_axes(phase, axis_name)
    return schedule


def check_tx(tx: Any) -> Any:
    """`tx`, or a ValueError if it is not an Optax transformation."""
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise ValueError(
            "`tx` must be an optax.GradientTransformation, with `init` and `update`;"
            f" got {type(tx).__name__}. For example optax.sgd(0.1)."
        )
    return tx


def check_mesh(mesh: Mesh, axis_name: AxisName) -> Mesh:
    """`mesh`, or a ValueError without such axes, or without devices of a process."""
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
    there = mesh.devices.ravel().tolist()
    left_out = {*range(jax.process_count())} - {each.process_index for each in there}
    if left_out and there[0] in jax.devices():  # and not of an absent accelerator
        raise ValueError(
            f"`mesh` must have devices of all {jax.process_count()} processes of this"
            f" job, got none of process {', '.join(map(str, sorted(left_out)))}. Use"
            " pj.data_mesh(), or start as many processes as are to train."
        )
    return mesh


def check_params(params: Any) -> None:
    """Every leaf of the parameters is a floating array."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if not leaves:
        raise ValueError("`params` must hold at least one array, got none.")
    for path, leaf in leaves:
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise ValueError(
                f"`params` must be floating arrays, got"
                f" `params{jax.tree_util.keystr(path)}` of dtype"
                f" {jnp.result_type(leaf).name}, which has no gradient. Keep it in"
                " `model_state`."
            )


def check_not_pipelined(opt_state: Any) -> None:
    """The optimizer does not delay what the train step delays already."""
    leaves = jax.tree.leaves(opt_state, is_leaf=_in_flight)
    if any(_in_flight(leaf) for leaf in leaves):
        raise ValueError(
            "`tx` must not hold pj.pipelined_mean, got one in its state: the train step"
            " itself averages and delays the gradients. Leave it out, and set `width`."
        )


def _in_flight(node: Any) -> bool:
    return isinstance(node, PipelinedMeanState)


def check_batch(batch: Any, devices: int, microbatches: int) -> None:
    """Every leaf has the same leading axis, which divides into the parts."""
    lengths = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
    parts = devices * microbatches
    if len(lengths) == 1 and () not in lengths:
        (size,) = lengths.pop()
        if size and size % parts == 0:
            return
        raise ValueError(
            "`batch` must divide among devices and microbatches: a global batch of"
            f" {size} is no positive multiple of {devices} devices x {microbatches}"
            f" microbatches = {parts}. Drop the remainder, or choose a multiple of"
            f" {parts}."
        )
    shapes = {
        f"batch{jax.tree_util.keystr(path)}": jnp.shape(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch)
    }
    raise ValueError(
        "`batch` must hold arrays with one common leading axis, the examples; got"
        f" shapes {shapes}. Broadcast what is shared over the batch, or close over it"
        " in the loss function."
    )


def check_state(state: Any, devices: set[Any]) -> None:
    """`state` is what `init` returns, here, and its warm-up known on the host."""
    if not isinstance(state, PipelineState):
        raise ValueError(
            "`state` must be the pj.PipelineState that `train.init` returned, got"
            f" {type(state).__name__}."
        )
    if isinstance(state.calls, jax.core.Tracer):
        raise ValueError(
            "`train.step` must not be traced in a run with `warmup_steps` or a schedule"
            " of all-reduces: which program runs is decided between steps, got a traced"
            " `state.calls`. Call it outside jit and scan, or warm up with"
            " `train.plain` first."
        )
    step = state.step
    if isinstance(step, jax.core.Tracer) or not isinstance(step, jax.Array):
        return
    if step.committed and step.sharding.device_set != devices:
        raise ValueError(
            f"`state` must be of this mesh, on devices {_ids(devices)}; got one on"
            f" devices {_ids(step.sharding.device_set)}. {_GO_ON}"
        )


def _ids(devices: Any) -> list[int]:
    return sorted(device.id for device in devices)


def check_in_flight(
    in_flight: PipelinedMeanState, width: int, devices: int, *, feeds_back: bool
) -> None:
    """The pipeline in the state is as wide as the step's, and on as many devices.

    And it has a deviation where the step feeds that back.
    """
    found = width_of(in_flight)
    if found != width:
        raise ValueError(
            f"`state` must be of width {width}, as this train step; got one of width"
            f" {found}. {_GO_ON}"
        )
    parts = in_flight.filled.shape[0]
    if parts != devices:
        raise ValueError(
            f"`state` must be of this mesh, with {devices} devices; got one of"
            f" {parts} devices, which has as many gradients in flight. {_GO_ON}"
        )
    kept = bool(in_flight.deviation)
    if kept != feeds_back:
        raise ValueError(
            f"`state` must {'' if feeds_back else 'not '}have a deviation to be fed"
            f" back, as this train step {'does' if feeds_back else 'does not'}; got one"
            f" {'with' if kept else 'without'} it. {_GO_ON}"
        )


def check_lengths(in_flight: PipelinedMeanState, least: dict[str, int]) -> None:
    """What is in flight has the dtypes of these gradients, and room for them."""
    lengths = lengths_of(in_flight)
    if in_flight.pending and (
        lengths.keys() != least.keys() or any(lengths[k] < least[k] for k in least)
    ):
        raise ValueError(
            "`state` must have gradients in flight of these parameters and this"
            f" `reduce_dtype`: at least {least} elements, got {lengths}. {_GO_ON}"
        )


def check_room(
    message: Any, in_flight: PipelinedMeanState, reduce_dtype: DTypeLike | None
) -> None:
    """Everything in the message has its place among the gradients in flight."""
    expected, lengths = buckets.sizes(message, reduce_dtype), lengths_of(in_flight)
    if not in_flight.pending or lengths == expected:
        return
    metrics = [
        jax.tree_util.keystr(path)
        for path, _ in jax.tree_util.tree_leaves_with_path(message.metrics)
    ]
    if lengths == buckets.sizes(message._replace(metrics=None), reduce_dtype):
        raise ValueError(
            "`batch` must be given to `train.init` when `loss_fn` returns metrics,"
            f" which travel with the gradients; got metrics {metrics} for which the"
            " state has no room. Call `train.init(params, ..., batch=batch)`."
        )
    raise ValueError(
        "`state` must have been made for what `loss_fn` returns: metrics"
        f" {metrics}, {expected} elements in all, got one with {lengths} in flight."
        f" {_GO_ON}"
    )


_GO_ON = (
    "Drain it with the train step that made it, then go on from"
    " `train.init(state.params, opt_state=state.opt_state)`."
)
