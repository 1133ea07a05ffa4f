"""nanodo: FSDP of a GPT, whose optimizer accumulates two batches."""

import pathlib
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pipejax as pj

from . import _loops
from ._program import Conversion, History, Program
from ._sources import load

FOLDER = "nanodo"
CONVERSION = Conversion(
    changed=(
        "import pipejax",
        "the mesh has an axis of the hosts",
        "_train_step becomes a loss: `params, batch`",
        "it calls get_loss_fn",
        "with a model of `fsdp_enabled=False`, which applies parameters that are split",
        "it returns pj.Aux, whose weight is the number of tokens",
        "make_train_step",
        "train.init, with a batch",
        "train.batch places the batch",
        "train.step",
        "train.drain at the end",
    ),
    around=(
        "metrics of the batch from `info`",
        "statistics of the parameters from `state.params`",
        "those of gradients and updates from snapshots in the optimizer",
        "the infos of the steps are kept, in place of metrics of microbatches",
        "a TrainState of the state, for evaluation and checkpoint",
    ),
)


def program(sources: pathlib.Path, steps: int, seed: int) -> Program:
    """Makes the program, with one block; each step is a half of an update."""
    folder = sources / FOLDER
    clu = ("clu.metric_writers", "clu.periodic_actions")
    names = ("train", "model_factory", "optimizer", "configs.default")
    train, factory, optimizer, default = load(
        (folder,),
        [f"nanodo.{name}" for name in names],
        ("tensorflow_datasets", "sentencepiece", *clu),
    )
    c = default.get_config()
    c.model.update(D=32, H=2, L=16, N=1, F=64, dtype="float32")
    c.opt.update(warmup_steps=4, num_train_steps=steps, clip_by_global_norm=1.0)
    c.opt.grad_accumulation_steps = 2
    devices = np.array(jax.devices()[: _loops.DEVICES])
    mesh = Mesh(devices, ("data",))
    wide = Mesh(devices.reshape(2, -1), ("host", "data"))
    net, get_loss_fn = factory.get_model_and_loss(c, 64)
    tx = optimizer.get_optimizer(c.opt)
    key = jax.random.PRNGKey(seed)
    shardings, start = train._init_train_state(c, net, rng=key, mesh=mesh)
    over_groups, _ = train._init_train_state(c, net, rng=key, mesh=wide)
    rng = np.random.default_rng(seed)
    batches = [_tokens(rng) for _ in range(steps)]

    def placed(params: Any, shardings: Any) -> Any:
        return jax.device_put(params, shardings.params)

    def original(params: Any) -> History:
        state = start.replace(params=params, opt_state=tx.init(params))
        trainer = train.Trainer(
            c, jax.device_put(state, shardings), mesh, shardings, get_loss_fn
        )
        history = History([], [])
        for step, each in enumerate(batches):
            found = trainer.do_step(step // 2, each)
            history.params.append(jax.tree.map(np.array, trainer.state.params))
            history.reported.append((found["train_loss"], found["train_ntokens"]))
        return history

    @jax.jit
    def gradient(params: Any, tokens: Any) -> Any:
        loss = get_loss_fn(tokens, net.apply, c)
        (mean, aux), found = jax.value_and_grad(loss, has_aux=True)(params)
        return (mean, aux.ntokens), found

    def delayed(params: Any) -> History:
        rows = jax.device_put(batches, NamedSharding(mesh, P("data")))
        params = placed(params, shardings)
        return _loops.delayed(gradient, tx, params, lambda i, _: rows[i], steps)

    # Flax' DenseGeneral gives an initial value a spec before it has its shape, and JAX
    # refuses this wherever a mesh is set, as inside `shard_map`.
    whole = c.copy_and_resolve_references()
    whole.model.fsdp_enabled = False
    plain, _ = factory.get_model_and_loss(whole, 64)

    def loss_fn(params: Any, batch: Any) -> Any:
        loss, aux = get_loss_fn(batch, plain.apply, c)(params)
        return loss, pj.Aux(weight=aux.ntokens)

    def converted(params: Any, width: int) -> History:
        step = _loops.train_step(loss_fn, tx, width, mesh=wide, axis_name="host")
        rows = [step.batch(each, axis_name=("host", "data")) for each in batches]
        state = step.init(placed(params, over_groups), batch=rows[0])
        return _loops.converted(
            step,
            state,
            lambda i, _: (rows[i], None),
            steps,
            lambda info: (info.loss, info.weight),
        )

    return Program(
        params=start.params,
        original=original,
        delayed=delayed,
        converted=converted,
    )


def _tokens(rng: np.random.Generator) -> np.ndarray:
    """Returns random tokens, of which each row has padding at its end."""
    tokens = rng.integers(1, 64, (8, 16))
    end = rng.integers(8, 17, (8, 1))
    return np.where(np.arange(16) < end, tokens, 0).astype(np.int32)
