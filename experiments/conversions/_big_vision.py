"""big_vision's `update_fn`: a ViT with mixup, and an optimizer with a schedule."""

import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from . import _loops
from ._program import Conversion, History, Program
from ._sources import function, load

FOLDER = "big_vision"
CONVERSION = Conversion(
    changed=(
        "import pipejax",
        "update_fn becomes a loss: `params, batch, *, shared`",
        "its key is folded with `shared`, the step, instead of the optimizer's count",
        "mixup without shard_map, since the loss already runs on every device",
        "tx with a snapshot of the norm of the updates",
        "make_train_step",
        "train.init in place of the train state",
        "train.step, with the key and the step",
        "train.drain at the end",
    ),
    around=(
        "measurements from `info`, the parameters and the snapshot",
        "a train state of the program's form, for evaluation and checkpoints",
        "the check for NaN waits until a loss has arrived",
    ),
    keys="mixup: the program's key, folded with the step",
)


def program(sources: pathlib.Path, steps: int, seed: int) -> Program:
    """Makes the program, with a ViT of one block on small random images."""
    folder = sources / FOLDER
    u, bv_optax, vit, mlc = load(
        (folder,),
        (
            "big_vision.utils",
            "big_vision.optax",
            "big_vision.models.vit",
            "ml_collections",
        ),
        ("tensorflow", "tensorflow.io", "tensorflow.io.gfile"),
    )
    config = mlc.ConfigDict(
        {
            "mixup": {"p": 0.2},
            "loss": "softmax_xent",
            "lr": 1e-3,
            "wd": 1e-4,
            "grad_clip_norm": 1.0,
            "optax_name": "scale_by_adam",
            "schedule": {"warmup_steps": steps // 4, "decay_type": "cosine"},
        }
    )
    model = vit.Model(
        num_classes=4, patch_size=(4, 4), width=16, depth=1, num_heads=2, mlp_dim=32
    )
    rng = np.random.default_rng(seed)
    batches = [
        {
            "image": rng.normal(size=(8, 8, 8, 3)).astype(np.float32),
            "labels": np.eye(4, dtype=np.float32)[rng.integers(0, 4, 8)],
        }
        for _ in range(steps)
    ]
    params = model.init(jax.random.PRNGKey(seed), batches[0]["image"])["params"]
    # The head begins at zero, so the rest would get no gradient in the first step.
    params["head"] = jax.tree.map(lambda x: x + 0.1, params["head"])
    tx, _ = bv_optax.make(
        config,
        params,
        sched_kw={"total_steps": steps, "batch_size": 8, "data_size": 64},
    )
    key = jax.random.PRNGKey(seed + 1)
    names = {
        "bv_optax": bv_optax,
        "config": config,
        "devices_flat": np.array(jax.devices()[: _loops.DEVICES]),
        "functools": functools,
        "jax": jax,
        "jnp": jnp,
        "model": model,
        "optax": optax,
        "shard_map": jax.shard_map,
        "tx": tx,
        "u": u,
        "P": jax.sharding.PartitionSpec,
    }
    source = (folder / "big_vision" / "train.py").read_text()
    update_fn = jax.jit(function(source, "update_fn", names))
    cut = functools.partial(
        function, source, "update_fn", before="params, opt =", returns="loss_fn"
    )
    on_batch = cut(names)
    on_device = cut({**names, "shard_map": lambda mixup, **_: mixup})

    def train_state(count: int) -> Any:
        """Returns the part of a state by which the program counts its steps."""
        return {"opt": optax.ScaleByScheduleState(count)}

    def original(params: Any) -> History:
        return updated(
            update_fn, {"params": params, "opt": tx.init(params)}, key, batches
        )

    @jax.jit
    def mean_gradient(params: Any, count: int, batch: Any) -> Any:
        return jax.value_and_grad(on_batch(train_state(count), key, batch))(params)

    def gradient(params: Any, inputs: Any) -> Any:
        loss, gradients = mean_gradient(params, *inputs)
        return (loss, {"l2_grads": optax.global_norm(gradients)}), gradients

    def delayed(params: Any) -> History:
        return _loops.delayed(
            gradient, tx, params, lambda i, _: (jnp.int32(i), batches[i]), steps
        )

    def loss_fn(params: Any, batch: Any, *, shared: Any) -> Any:
        return on_device(train_state(shared["step"]), shared["key"], batch)(params)

    def converted(params: Any, width: int) -> History:
        snapshot = optax.snapshot("l2_updates", optax.global_norm)
        train = _loops.train_step(loss_fn, optax.chain(tx, snapshot), width)
        return _loops.converted(
            train,
            train.init(params),
            lambda i, _: (batches[i], {"step": i, "key": key}),
            steps,
            lambda info: (info.loss, {"l2_grads": info.grad_norm}),
        )

    return Program(
        params=params,
        original=original,
        delayed=delayed,
        converted=converted,
    )


def updated(
    update_fn: Callable[..., Any],
    state: dict[str, Any],
    key: jax.Array,
    batches: Sequence[Any],
) -> History:
    """Returns the history of a loop over the program's own update."""
    history = History([], [])
    for batch in batches:
        state, found = update_fn(state, key, batch)
        history.params.append(state["params"])
        norms = {"l2_grads": found["l2_grads"]}
        history.reported.append((found["training_loss"], norms))
    return history
