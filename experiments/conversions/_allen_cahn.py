"""jaxpi's Allen-Cahn equation: a loss whose weights are computed now and then."""

import contextlib
import functools
import itertools
import pathlib
from typing import Any

import jax
from flax import jax_utils

from . import _loops
from ._program import Conversion, History, Program
from ._sources import load

FOLDER = "jaxpi"
EVERY = 5
CONVERSION = Conversion(
    changed=(
        "import pipejax",
        "a loss: `params, batch, *, shared`",
        "it calls `model.loss` with the device's row of the batch and `shared`",
        "make_train_step",
        "train.init, with the parameters of one replica",
        "train.step, with the weights of one replica",
        "before weights are computed: replicas of the parameters in `model.state`",
        "train.drain at the end",
    ),
    around=(
        "before the log: replicas of the parameters in `model.state`",
        "before a checkpoint: replicas of parameters and optimizer in `model.state`",
    ),
    keys="the program's sampler draws the points of every device",
)


def program(sources: pathlib.Path, steps: int, seed: int) -> Program:
    """Makes the program, with weights by norms of gradients, and causal losses."""
    package = sources / FOLDER
    example = package / "examples" / "allen_cahn"
    stubs = ("torch", "torch.utils", "torch.utils.data", "matplotlib")
    models, utils, samplers, default = load(
        (example, package),
        ("models", "utils", "jaxpi.samplers", "configs.default"),
        stubs,
    )
    config = default.get_config()
    config.seed = seed
    config.arch.hidden_dim, config.arch.num_layers = 16, 2
    config.arch.fourier_emb.embed_dim = 16
    config.weighting.num_chunks = 4
    with contextlib.chdir(example):
        values, times, places = utils.get_dataset()
    model = models.AllenCahn(config, values[0, ::32], times, places[::32])
    start = model.state
    domain = jax.numpy.array([[times[0], times[-1]], [places[0], places[-1]]])
    sampler = iter(samplers.UniformSampler(domain, 16))
    batches = list(itertools.islice(sampler, steps))

    def with_params(state: Any, params: Any) -> Any:
        return state.replace(params=jax_utils.replicate(params))

    def weights_of() -> Any:
        """Returns the weights of each step as a function of the parameters."""
        state = start

        def weights(i: int, params: Any) -> Any:
            nonlocal state
            if i and (i - 1) % EVERY == 0:
                state = model.update_weights(with_params(state, params), batches[i - 1])
            return _loops.first(state.weights)

        return weights

    @functools.partial(jax.pmap, axis_name="batch", in_axes=(None, None, 0))
    def mean_gradient(params: Any, weights: Any, batch: Any) -> Any:
        out = jax.value_and_grad(model.loss)(params, weights, batch)
        return jax.lax.pmean(out, "batch")

    def gradient(params: Any, inputs: Any) -> Any:
        loss, gradients = _loops.first(mean_gradient(params, *inputs))
        return (loss, None), gradients

    def original(params: Any) -> History:
        state, history = with_params(start, params), History([], [])
        for i, batch in enumerate(batches):
            one = _loops.first(state)
            # The step of the program does not return its loss.
            history.reported.append(gradient(one.params, (one.weights, batch))[0])
            state = model.step(state, batch)
            history.params.append(_loops.first(state.params))
            if i % EVERY == 0:
                state = model.update_weights(state, batch)
        return history

    def delayed(params: Any) -> History:
        weights = weights_of()
        return _loops.delayed(
            gradient,
            start.tx,
            params,
            lambda i, params: (weights(i, params), batches[i]),
            steps,
        )

    def loss_fn(params: Any, batch: Any, *, shared: Any) -> Any:
        return model.loss(params, shared, batch[0])

    def converted(params: Any, width: int) -> History:
        weights, step = weights_of(), _loops.train_step(loss_fn, start.tx, width)
        return _loops.converted(
            step,
            step.init(params),
            lambda i, params: (batches[i], weights(i, params)),
            steps,
        )

    return Program(
        params=_loops.first(start.params),
        original=original,
        delayed=delayed,
        converted=converted,
    )
