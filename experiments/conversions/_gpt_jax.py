"""gpt-jax, a GPT-2 under `pmap`, with dropout and a state that counts its steps."""

import functools
import pathlib
import types
from typing import Any

import jax
import numpy as np
from flax import jax_utils

from . import _loops
from ._program import Conversion, History, Program
from ._sources import function, load

FOLDER = "gpt-jax"
CONVERSION = Conversion(
    changed=(
        "import pipejax",
        "the loss takes `params, batch, *, shared`",
        "its tokens are the device's row of the batch",
        "its dropout key is the device's row, folded with `shared`, the step",
        "it calls `train_state.apply_fn`",
        "make_train_step",
        "train.init in place of `replicate`",
        "train.step, with tokens, keys and the step",
        "train.drain at the end",
    ),
    around=(
        "the log gets `info.loss`",
        "for evaluation and checkpoint, a replicated TrainState of the state",
    ),
    keys="dropout: the program's key of each device, folded with the step",
)


def program(sources: pathlib.Path, steps: int, seed: int) -> Program:
    """Makes the program, with one small block and the optimizer of its defaults."""
    folder = sources / FOLDER
    stubs = ("wandb", "tensorflow", "dataset")
    train, model = load((folder,), ("train", "model"), stubs)
    # Flax now gives the parameters as a dict, so the mask of the decay is a dict, too.
    train.frozen_dict = types.SimpleNamespace(freeze=lambda tree: tree)
    shape = {"block_size": 16, "vocab_size": 64, "num_layers": 1, "num_heads": 2}
    gpt = model.GPTConfig(**shape, num_embeds=32, dtype="float32")
    config = train.TrainConfig(seed=seed, model=gpt, batch_size=2)
    start = train.init_train_state(jax.random.PRNGKey(seed), config, 1e-3)
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 64, (steps, _loops.DEVICES, 2, 17)).astype(np.uint16)
    keys = jax.random.split(jax.random.PRNGKey(seed + 1), _loops.DEVICES)

    def original(params: Any) -> History:
        state, history = jax_utils.replicate(start.replace(params=params)), []
        reported = []
        for each in tokens:
            loss, state = train.train_step(state, each, keys)
            history.append(_loops.first(state).params)
            reported.append((_loops.first(loss), None))
        return History(history, reported)

    cut = function(
        (folder / "train.py").read_text(),
        "train_step",
        vars(train),
        before="loss, grads",
        returns="loss_fn(state.params)",
    )

    def loss_of(params: Any, tokens: Any, key: Any, step: Any) -> Any:
        return cut(start.replace(params=params, step=step), tokens, key)

    @functools.partial(jax.pmap, axis_name="batch", in_axes=(None, 0, 0, None))
    def mean_gradient(params: Any, tokens: Any, key: Any, step: Any) -> Any:
        out = jax.value_and_grad(loss_of)(params, tokens, key, step)
        return jax.lax.pmean(out, "batch")

    def gradient(params: Any, inputs: Any) -> Any:
        loss, gradients = _loops.first(mean_gradient(params, *inputs))
        return (loss, None), gradients

    def delayed(params: Any) -> History:
        return _loops.delayed(
            gradient, start.tx, params, lambda i, _: (tokens[i], keys, i), steps
        )

    def loss_fn(params: Any, batch: Any, *, shared: Any) -> Any:
        return loss_of(params, batch["tokens"][0], batch["key"][0], shared)

    def converted(params: Any, width: int) -> History:
        step = _loops.train_step(loss_fn, start.tx, width)
        return _loops.converted(
            step,
            step.init(params),
            lambda i, _: ({"tokens": tokens[i], "key": keys}, i),
            steps,
        )

    return Program(
        params=start.params,
        original=original,
        delayed=delayed,
        converted=converted,
    )
