"""Compares training on a GPU with steps by hand, and codecs with those of the CPU.

Steps by hand and steps of pipejax do the same arithmetic, but XLA compiles them into
different kernels, whose sums may be rounded differently. Each comparison therefore
states whether all bits are the same, and how large the largest difference is.
"""

import functools
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

import pipejax as pj
from experiments import by_hand, codec_speed, overlap
from pipejax import checkpoint

from ._arrays import filled, is_small

STEPS = 8


# The step by hand that does the same as a step of pipejax, and the settings of that.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "width 1": ("synchronous", {"width": 1}),
    "width 2, plain": ("plain", {"weight_prediction": False}),
    "width 2, predicted": ("predicted", {}),
    "width 2, donated": ("predicted", {"donate": True}),
    "width 2, host executor": ("predicted", {"executor": "host"}),
    "width 2, sharded optimizer": (
        "plain",
        {"weight_prediction": False, "shard_optimizer": True},
    ),
}


def measured() -> dict[str, Any]:
    """Returns the differences of all steps, of restored states, and of all codecs."""
    problem = overlap.plain_problem("mlp" if is_small() else "resnet18", 1)
    params = filled(problem.params)
    batches = [filled(problem.batch, seed=1 + i) for i in range(STEPS)]
    given = problem.loss_fn, optax.adamw(1e-3), pj.data_mesh(1)

    def make(**settings: Any) -> pj.TrainStep:
        loss_fn, tx, mesh = given
        return pj.make_train_step(loss_fn, tx, mesh=mesh, **settings)

    with jax.default_matmul_precision("highest"):
        twins = {
            "synchronous": synchronous(*given, params, batches),
            "plain": pipelined(*given, params, batches, predicts=False),
            "predicted": pipelined(*given, params, batches, predicts=True),
        }
        steps = {
            name: difference(trained(make(**settings), params, batches), twins[twin])
            for name, (twin, settings) in CASES.items()
        }
        return {
            "steps": steps,
            "restored": restored(make(), params, batches),
            "skipped": skipped(make(width=1), params, batches[0]),
            "codecs": {name: codec(new) for name, new in codec_speed.CODECS.items()},
        }


def difference(found: Any, expected: Any) -> dict[str, Any]:
    """Returns whether two pytrees have the same bits, and their largest difference.

    The difference is relative to the largest element of `expected`.
    """
    pairs = [
        (np.asarray(a), np.asarray(b))
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    ]
    largest = max(float(np.abs(b.astype(np.float64)).max()) for _, b in pairs)
    apart = max(
        float(np.abs(a.astype(np.float64) - b.astype(np.float64)).max())
        for a, b in pairs
    )
    same = all(a.tobytes() == b.tobytes() for a, b in pairs)
    return {"same_bits": same, "largest_difference": apart / largest}


def stepped(train: pj.TrainStep, state: Any, batches: Sequence[Any]) -> Any:
    """Returns the state after a step with each batch."""
    for batch in batches:
        state, _ = train.step(state, batch)
    return state


def trained(train: pj.TrainStep, params: Any, batches: Sequence[Any]) -> Any:
    """Returns the parameters after a step with each batch, and a drain."""
    state, _ = train.drain(stepped(train, train.init(params), batches))
    return jax.device_get(state.params)


def synchronous(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    mesh: Mesh,
    params: Any,
    batches: Sequence[Any],
) -> Any:
    """Returns the parameters after a synchronous step by hand with each batch."""
    step = by_hand.synchronous(loss_fn, tx, mesh, checks=True)
    opt_state = tx.init(params)
    for batch in batches:
        params, opt_state, _ = step(params, opt_state, batch)
    return jax.device_get(params)


def pipelined(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    mesh: Mesh,
    params: Any,
    batches: Sequence[Any],
    *,
    predicts: bool,
) -> Any:
    """Returns the parameters after a delayed step by hand with each batch, and a drain.

    The first step applies nothing, and only its gradient is used.
    """
    first = by_hand.pipelined(loss_fn, tx, mesh, checks=True)
    nothing = jax.tree.map(jnp.zeros_like, params)
    _, _, stale, _ = first(params, tx.init(params), nothing, batches[0])
    step = by_hand.pipelined(loss_fn, tx, mesh, predicts=predicts, checks=True)
    opt_state = tx.init(params)
    for batch in batches[1:]:
        params, opt_state, stale, _ = step(params, opt_state, stale, batch)
    updates, _ = jax.jit(tx.update)(stale, opt_state, params)
    return jax.device_get(optax.apply_updates(params, updates))


def restored(
    train: pj.TrainStep, params: Any, batches: Sequence[Any]
) -> dict[str, Any]:
    """Compares a run that is saved and restored halfway with one that is not."""
    half = len(batches) // 2
    state = stepped(train, train.init(params), batches[:half])
    with (
        tempfile.TemporaryDirectory() as folder,
        checkpoint.manager(folder) as manager,
    ):
        checkpoint.save(manager, state)
        manager.wait_until_finished()
        state = checkpoint.restore(manager, train, train.init(params)).state
    state, _ = train.drain(stepped(train, state, batches[half:]))
    return difference(state.params, trained(train, params, batches))


def skipped(train: pj.TrainStep, params: Any, batch: Any) -> dict[str, Any]:
    """Compares parameters before and after a step whose gradients are not finite."""
    broken = jax.tree.map(
        lambda x: np.full_like(x, np.nan) if x.dtype.kind == "f" else x, batch
    )
    state, _ = train.step(train.init(params), broken)
    return difference(state.params, params)


def codec(make: Callable[[], Any]) -> dict[str, Any]:
    """Compares messages, and what they decode to, with those of the CPU."""
    x = np.random.default_rng(0).normal(size=2**20).astype(np.float32)
    found = []
    for device in (jax.devices()[0], jax.devices("cpu")[0]):
        with jax.default_device(device):
            made = make()
            state = made.init(x.size, jnp.uint32(0))
            message, _ = jax.jit(made.encode)(x, state)
            decoded = jax.jit(functools.partial(made.decode, n=x.size))(message)
            found.append(jax.device_get((message, decoded)))
    (message, decoded), (expected, expected_decoded) = found
    bits = difference(message, expected)["same_bits"]
    return {"same_message": bits, **difference(decoded, expected_decoded)}
