"""denoising-diffusion-flax: noise, and a moving average whose loss is a metric."""

import functools
import pathlib
from typing import Any

import jax
import numpy as np
from flax import jax_utils
from jax import lax

import pipejax as pj

from . import _loops
from ._program import Conversion, History, Program
from ._sources import function, load

FOLDER = "denoising-diffusion-flax"
EVERY = 2
CONVERSION = Conversion(
    changed=(
        "import pipejax",
        "p_loss becomes a loss: `params, batch, *, shared`",
        "its images are the device's row of the batch",
        "its key is the device's row of the batch",
        "the state of its own estimate, without a derivative",
        "it returns its loss, and that of the average as a metric",
        "make_train_step",
        "train.init in place of `replicate`, with a batch and the average",
        "train.step, with images, keys and the average",
        "`jit` of apply_ema_decay, which takes the parameters",
        "the average begins as a copy of the parameters",
        "the average follows the parameters",
        "train.drain at the end",
    ),
    around=(
        "the infos of the steps are kept in a list",
        "pj.mean_info of the list is logged",
        "a replicated TrainState of the state, for samples and checkpoints",
    ),
    keys="time and noise: the program's key of each device",
)


def program(sources: pathlib.Path, steps: int, seed: int) -> Program:
    """Makes the program, with a small U-Net that conditions on its own estimate."""
    folder = sources / FOLDER / "denoising_diffusion_flax"
    stubs = ("wandb", "tensorflow", "tensorflow_datasets", "clu")
    train, utils, default = load(
        (folder,), ("train", "utils", "configs.oxford102_p2_selfcondition"), stubs
    )
    config = default.get_config()
    config.seed = seed
    config.model.dim, config.model.dim_mults = 8, (1, 2)
    config.data.image_size, config.ddpm.timesteps = 8, 50
    start = train.create_train_state(jax.random.PRNGKey(seed), config)
    settings = {
        "ddpm_params": utils.get_ddpm_params(config.ddpm),
        "loss_fn": train.get_loss_fn(config),
        "self_condition": config.ddpm.self_condition,
        "is_pred_x0": config.ddpm.pred_x0,
    }
    rng = np.random.default_rng(seed)
    shape = (steps, _loops.DEVICES, 2, 8, 8, 3)
    images = rng.uniform(-1, 1, shape).astype(np.float32)
    keys = jax.random.split(jax.random.PRNGKey(seed + 1), (steps, _loops.DEVICES))
    p_loss = functools.partial(train.p_loss, **settings, pmap_axis="batch")
    p_train_step = jax.pmap(p_loss, axis_name="batch")
    apply_ema = jax.jit(train.apply_ema_decay)
    cut = function(
        (folder / "train.py").read_text(),
        "p_loss",
        vars(train),
        before="dynamic_scale",
        returns="compute_loss",
    )

    def averages() -> Any:
        """Returns the average before each step as a function of the parameters."""
        state = start

        def average(i: int, params: Any) -> Any:
            nonlocal state
            if i and i % EVERY == 0:
                state = apply_ema(state.replace(params=params), 0.9)
            return state.params_ema

        return average

    def losses(params: Any, average: Any, images: Any, key: Any) -> Any:
        # The estimate on which the network conditions has no derivative.
        state = start.replace(params=lax.stop_gradient(params))
        compute_loss = cut(key, state, {"image": images}, **settings)
        return compute_loss(params), compute_loss(average)

    def original(params: Any) -> History:
        average, history = averages(), History([], [])
        state = jax_utils.replicate(start.replace(params=params))
        for i in range(steps):
            mean = average(i, _loops.first(state.params))
            state = state.replace(params_ema=jax_utils.replicate(mean))
            state, metrics = p_train_step(keys[i], state, {"image": images[i]})
            metrics = _loops.first(metrics)
            history.reported.append((metrics["loss"], {"ema": metrics["loss_ema"]}))
            history.params.append(_loops.first(state.params))
        return history

    @functools.partial(jax.pmap, axis_name="batch", in_axes=(None, None, 0, 0))
    def mean_gradient(*args: Any) -> Any:
        out = jax.value_and_grad(losses, has_aux=True)(*args)
        return lax.pmean(out, "batch")

    def gradient(params: Any, inputs: Any) -> Any:
        (loss, ema), gradients = _loops.first(mean_gradient(params, *inputs))
        return (loss, {"ema": ema}), gradients

    def delayed(params: Any) -> History:
        average = averages()
        return _loops.delayed(
            gradient,
            start.tx,
            params,
            lambda i, params: (average(i, params), images[i], keys[i]),
            steps,
        )

    def loss_fn(params: Any, batch: Any, *, shared: Any) -> Any:
        loss, ema = losses(params, shared, batch["image"][0], batch["key"][0])
        return loss, pj.Aux(metrics={"ema": ema})

    def converted(params: Any, width: int) -> History:
        average, step = averages(), _loops.train_step(loss_fn, start.tx, width)

        def inputs(i: int, params: Any) -> Any:
            return {"image": images[i], "key": keys[i]}, average(i, params)

        batch, shared = inputs(0, params)
        state = step.init(params, batch=batch, shared=shared)
        return _loops.converted(step, state, inputs, steps)

    return Program(
        params=start.params,
        original=original,
        delayed=delayed,
        converted=converted,
    )
