"""levanter's GPT-2, an Equinox model of Haliax' named arrays, under FSDP."""

import functools
import pathlib
from typing import Any

import equinox as eqx
import haliax
import jax
import numpy as np
import transformers  # noqa: F401  looks for packages, not for their stubs
from jax.sharding import Mesh, NamedSharding

import pipejax as pj

from . import _loops
from ._program import Conversion, History, Program
from ._sources import load

FOLDER = "levanter"
CONVERSION = Conversion(
    changed=(
        "import pipejax",
        "the mesh has an axis of the hosts",
        "the loss takes `params, batch`",
        "its axis mapping splits the batch over `data` alone",
        "it combines the model",
        "it names the axes of the tokens, and makes the examples of them",
        "it returns pj.Aux, whose weight is the number of tokens",
        "eqx.partition of the model",
        "make_train_step in place of Trainer",
        "train.init in place of trainer.initial_state",
        "train.batch places the tokens",
        "train.step",
        "train.drain at the end",
    ),
    around=(
        "hooks are called in the loop, with a StepInfo of the program",
        "a TrainerState of the state, for evaluation and checkpoint",
    ),
    dropped=("hooks inside of the step, which are given gradients and updates",),
)


def program(sources: pathlib.Path, steps: int, seed: int) -> Program:
    """Makes the program, with two small layers."""
    folder = sources / FOLDER / "src"
    names = ("models.gpt2", "models.lm_model", "trainer", "trainer_state", "optim")
    gpt2, lm, trainer, state_of, optim, tracker = load(
        (folder,),
        [f"levanter.{name}" for name in (*names, "tracker.tracker")],
        ("datasets", "git", "ray", "ray.actor", "ray.runtime_env"),
        stay=True,
    )
    rows, length = 8, 16
    config = gpt2.Gpt2Config(seq_len=length, hidden_dim=32, num_layers=2, num_heads=2)
    of_trainer = trainer.TrainerConfig(
        id="run", tracker=tracker.NoopConfig(), train_batch_size=rows
    )
    tx = optim.AdamConfig(
        learning_rate=1e-3, weight_decay=0.1, warmup=5, epsilon=1e-6
    ).build(steps)

    def mean(losses: Any, where: Any, axis: Any) -> Any:
        # JAX now wants a mask that is boolean.
        return haliax.mean(losses, where=where != 0, axis=axis)

    loss_function = functools.partial(lm.compute_next_token_loss, reduction=mean)
    made = trainer.Trainer(of_trainer, tx, loss_function, add_default_hooks=False)
    with made:
        start = haliax.named_jit(
            lambda: config.build(
                haliax.Axis("vocab", 64), key=jax.random.PRNGKey(seed)
            ),
            axis_resources=made.parameter_axis_mapping,
        )()
    first, static = eqx.partition(start, eqx.is_inexact_array)
    devices = np.array(jax.devices()[: _loops.DEVICES])
    wide = Mesh(devices.reshape(2, -1), ("host", "data"))
    rng = np.random.default_rng(seed)
    tokens = [
        rng.integers(1, 64, (rows, length)).astype(np.int32) for _ in range(steps)
    ]
    for each in tokens:
        each[np.arange(length) >= rng.integers(8, length + 1, (rows, 1))] = 0

    def examples(tokens: Any) -> Any:
        named = haliax.named(tokens, ("batch", config.Pos.name))
        one = functools.partial(lm.LmExample.causal, ignore_id=0)
        return haliax.vmap(one, named.resolve_axis("batch"))(named)

    def original(params: Any) -> History:
        model = eqx.combine(_like(params, first), static)
        key, history = jax.random.PRNGKey(seed), History([], [])
        with made:
            state = state_of.TrainerState.init(tx, model, key=key, mp=made.mp)
            for each in map(examples, tokens):
                step = made._jit_train_step_fn_no_hook
                loss, state, *_ = step(state, (each,), {})
                after = eqx.filter(state.model, eqx.is_inexact_array)
                history.params.append(jax.tree.map(np.array, after))
                history.reported.append((loss, None))
        return history

    @jax.jit
    def gradient(params: Any, each: Any) -> Any:
        model = eqx.combine(params, static)
        loss, found = made._compute_gradients_microbatched(made.loss_fn, model, each)
        return (loss, None), found

    def delayed(params: Any) -> History:
        with made:
            batches = list(map(examples, tokens))
            return _loops.delayed(
                gradient, tx, _like(params, first), lambda i, _: batches[i], steps
            )

    def loss_fn(params: Any, batch: Any) -> Any:
        with haliax.axis_mapping({"batch": "data"}):
            each = examples(batch)
            loss = loss_function(eqx.combine(params, static), each)
            return loss.scalar(), pj.Aux(weight=each.loss_mask.sum().array)

    def converted(params: Any, width: int) -> History:
        step = _loops.train_step(loss_fn, tx, width, mesh=wide, axis_name="host")
        batches = [step.batch(each, axis_name=("host", "data")) for each in tokens]
        state = step.init(_like(params, first, wide), batch=batches[0])
        return _loops.converted(step, state, lambda i, _: (batches[i], None), steps)

    return Program(
        params=first,
        original=original,
        delayed=delayed,
        converted=converted,
    )


def _like(params: Any, placed: Any, mesh: Mesh | None = None) -> Any:
    """Returns parameters that are split as others are, maybe on another mesh."""

    def one(x: Any, like: Any) -> Any:
        sharding = like.sharding
        return jax.device_put(
            np.array(x), NamedSharding(mesh, sharding.spec) if mesh else sharding
        )

    return jax.tree.map(one, params, placed)
