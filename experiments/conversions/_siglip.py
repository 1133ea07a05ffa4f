"""big_vision's SigLIP, whose loss compares each image with all texts of a batch."""

import functools
import pathlib
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from . import _loops
from ._big_vision import updated
from ._program import Conversion, History, Program
from ._sources import function, load

FOLDER = "big_vision"
CONVERSION = Conversion(
    changed=(
        "import pipejax",
        "update_fn becomes a loss: `params, batch`",
        "the texts of all devices are gathered",
        "the number of the device's first row",
        "`eye` has the device's rows",
        "tx with a snapshot of the norm of the updates",
        "make_train_step",
        "train.init in place of the train state",
        "train.step",
        "train.drain at the end",
    ),
    around=(
        "measurements from `info`, the parameters and the snapshot",
        "a train state of the program's form, for evaluation and checkpoints",
        "the check for NaN waits until a loss has arrived",
    ),
)
OVER_DEVICES = {
    "logits = jnp.dot": """
ztxt = jax.lax.all_gather(ztxt, "data", tiled=True)
logits = jnp.dot(zimg, ztxt.T)
""",
    "eye = ": """
first = jax.lax.axis_index("data") * len(zimg)
eye = jnp.eye(len(zimg), len(ztxt), first)
""",
}


def program(sources: pathlib.Path, steps: int, seed: int) -> Program:
    """Makes the program, with two towers of one block each."""
    folder = sources / FOLDER
    models = "big_vision.models"
    places = (f"{models}.vit", f"{models}.proj.image_text.text_transformer")
    vit, text, two_towers, bv_optax, mlc = load(
        (folder,),
        (
            *places,
            f"{models}.proj.image_text.two_towers",
            "big_vision.optax",
            "ml_collections",
        ),
        ("tensorflow", "tensorflow.io", "tensorflow.io.gfile"),
    )
    # The model imports its towers whenever it is called.
    found = dict(zip(places, (vit, text), strict=True))
    two_towers.importlib = types.SimpleNamespace(import_module=found.__getitem__)
    config = mlc.ConfigDict(
        {
            "lr": 1e-3,
            "wd": 1e-4,
            "grad_clip_norm": 1.0,
            "optax_name": "scale_by_adam",
            "optax": {"eps": 1e-5},  # biases of keys have no gradient, but rounding
            "schedule": {"warmup_steps": steps // 4, "decay_type": "cosine"},
        }
    )
    tower = {"width": 16, "depth": 1, "num_heads": 2, "mlp_dim": 32}
    model = two_towers.Model(
        image={**tower, "patch_size": (4, 4), "head_zeroinit": False},
        text={**tower, "vocab_size": 32},
        out_dim=8,
        temperature_init=10.0,
        bias_init=-10.0,
    )
    rng = np.random.default_rng(seed)
    batches = [
        {
            "image": rng.normal(size=(16, 8, 8, 3)).astype(np.float32),
            "labels": rng.integers(0, 32, (16, 6)).astype(np.int32),
        }
        for _ in range(steps)
    ]
    first = batches[0]["image"], batches[0]["labels"]
    params = model.init(jax.random.PRNGKey(seed), *first)["params"]
    tx, _ = bv_optax.make(
        config,
        params,
        sched_kw={"total_steps": steps, "batch_size": 16, "data_size": 64},
    )
    key = jax.random.PRNGKey(seed + 1)
    names = {
        "bv_optax": bv_optax,
        "config": config,
        "jax": jax,
        "jnp": jnp,
        "model": model,
        "optax": optax,
        "tx": tx,
    }
    path = folder / "big_vision" / "trainers" / "proj" / "image_text" / "siglip.py"
    source = path.read_text()
    update_fn = jax.jit(function(source, "update_fn", names))
    cut = functools.partial(
        function, source, "update_fn", names, before="params, opt =", returns="loss_fn"
    )
    on_batch, on_device = cut(), cut(lines=OVER_DEVICES)
    none = {"opt": optax.ScaleByScheduleState(0)}  # counts for a key that nobody uses

    def original(params: Any) -> History:
        return updated(
            update_fn, {"params": params, "opt": tx.init(params)}, key, batches
        )

    @jax.jit
    def gradient(params: Any, batch: Any) -> Any:
        loss, found = jax.value_and_grad(on_batch(none, key, batch))(params)
        return (loss, {"l2_grads": optax.global_norm(found)}), found

    def delayed(params: Any) -> History:
        return _loops.delayed(gradient, tx, params, lambda i, _: batches[i], steps)

    def loss_fn(params: Any, batch: Any) -> Any:
        return on_device(none, key, batch)(params)

    def converted(params: Any, width: int) -> History:
        snapshot = optax.snapshot("l2_updates", optax.global_norm)
        train = _loops.train_step(loss_fn, optax.chain(tx, snapshot), width)
        return _loops.converted(
            train,
            train.init(params),
            lambda i, _: (batches[i], None),
            steps,
            lambda info: (info.loss, {"l2_grads": info.grad_norm}),
        )

    return Program(
        params=params,
        original=original,
        delayed=delayed,
        converted=converted,
    )
