"""Flax's Gemma, a model in NNX that is sharded on a mesh with axes of type Explicit."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pipejax as pj
import pipejax.flax.nnx

from . import _loops
from ._program import Conversion, History, Program
from ._sources import function, load

FOLDER = "flax"
CONVERSION = Conversion(
    changed=(
        "import pipejax",
        "import pipejax.flax.nnx",
        "jax_train_step becomes a loss: `model, batch, rngs`",
        "it returns pj.Aux, whose weight is the number of tokens",
        "the accuracy of the batch, which nnx.MultiMetric counted",
        "the mesh has an axis of the hosts",
        "pj.flax.nnx.split of the model",
        "make_train_step",
        "train.init in place of nnx.Optimizer",
        "train.batch places the batch",
        "train.step",
        "train.drain at the end",
    ),
    around=(
        "`info.loss` is printed in the first steps",
        "the infos of the steps are kept in a list, in place of nnx.MultiMetric",
        "pj.mean_info of the list is logged",
        "pj.flax.nnx.update of the model, for evaluation, samples and checkpoint",
        "the state for the checkpoint",
    ),
    dropped=("activations that the model sows are not returned",),
)


def program(
    sources: pathlib.Path,
    steps: int,
    seed: int,
    *,
    groups: tuple[int, int, int] = (2, 2, 1),
) -> Program:
    """Makes the program, with two layers.

    Args:
      sources: The folder with the clones.
      steps: The number of steps.
      seed: The seed of parameters and data.
      groups: The lengths of the axes of hosts, FSDP and tensor parallelism. The
        program's own mesh has the last two, and the first is a part of FSDP there.
    """
    folder = sources / FOLDER / "examples" / "gemma"
    clu = ("clu.metric_writers", "clu.periodic_actions")
    stubs = ("input_pipeline", "tokenizer", "sampler", *clu)
    names = ("train", "transformer", "transformer_cfg", "sow_lib")
    train, transformer, config, sow = load((folder,), names, stubs)
    hosts, fsdp, tensor = groups
    shape = (hosts * fsdp, tensor)
    mesh = jax.make_mesh(shape, ("fsdp", "tensor"))
    wide = jax.make_mesh(groups, ("host", "fsdp", "tensor"))
    settings = config.TransformerConfig(
        **{"num_layers": 2, "num_embed": 64, "embed_dim": 32, "hidden_dim": 64},
        **{"num_heads": 4, "head_dim": 8, "num_kv_heads": 2},
        final_logit_softcap=30.0,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        attention_types=(
            config.AttentionType.LOCAL_SLIDING,
            config.AttentionType.GLOBAL,
        ),
        sliding_window_size=8,
        shd_config=config.ShardingConfig.fsdp_tp_sharding(
            fsdp_axis_name="fsdp", tensor_parallel_axis_name="tensor"
        ),
    )
    rate = train.create_learning_rate_schedule(1.6e-3, 5)
    tx = optax.adamw(rate, b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.1)
    batches = _batches(np.random.default_rng(seed), steps)
    cut = function(
        (folder / "train.py").read_text(),
        "jax_train_step",
        vars(train),
        before="grad_fn",
        returns="loss_fn(params, rngs)",
    )

    def built(mesh: Any) -> Any:
        with jax.set_mesh(mesh):
            rngs = nnx.Rngs(params=seed, dropout=seed)
            made = transformer.Transformer(
                settings, rngs=rngs, sow_config=sow.SowConfig()
            )
        return made

    def with_params(model: Any, params: Any) -> Any:
        old = _params(model)
        new = jax.tree.map(lambda x, y: jax.device_put(x, y.sharding), params, old)
        nnx.update(model, new)
        return model

    def metrics() -> Any:
        return nnx.MultiMetric(
            loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy()
        )

    def losses(model: Any, batch: Any, rngs: Any) -> Any:
        mean, (_, logits, _) = cut(model, None, rngs, batch, None)
        known = batch["inputs"] > 0
        right = jnp.where(known, logits.argmax(axis=-1) == batch["targets"], 0)
        return mean, right.sum() / known.sum(), known.sum()

    def original(params: Any) -> History:
        model, history = with_params(built(mesh), params), History([], [])
        with jax.set_mesh(mesh):
            optimizer = nnx.Optimizer(model, tx=tx, wrt=nnx.Param)
            rngs = nnx.Rngs(params=seed, dropout=seed)
            step = jax.jit(train.jax_train_step)
            for each in batches:
                batch = jax.device_put(each, NamedSharding(mesh, P("fsdp")))
                one = metrics()
                updates, _ = step(model, optimizer, rngs, batch, one)
                nnx.update((model, optimizer, rngs, one), updates)
                found = one.compute()
                history.params.append(_params(model))
                history.reported.append(
                    (found["loss"], {"accuracy": found["accuracy"]})
                )
        return history

    def delayed(params: Any) -> History:
        model = with_params(built(mesh), params)
        parts: Any = nnx.split(model, nnx.Param, ...)
        graph, _, rest = parts

        @jax.jit
        def gradient(params: Any, batch: Any) -> Any:
            def loss(params: Any) -> Any:
                model = nnx.merge(graph, params, rest)
                mean, accuracy, _ = losses(model, batch, nnx.Rngs(seed))
                return mean, accuracy

            (mean, accuracy), found = jax.value_and_grad(loss, has_aux=True)(params)
            return (mean, {"accuracy": accuracy}), found

        with jax.set_mesh(mesh):
            rows = jax.device_put(batches, NamedSharding(mesh, P("fsdp")))
            return _loops.delayed(
                gradient, tx, _params(model), lambda i, _: rows[i], steps
            )

    def loss_fn(model: Any, batch: Any, rngs: Any) -> Any:
        loss, accuracy, known = losses(model, batch, rngs)
        return loss, pj.Aux(metrics={"accuracy": accuracy}, weight=known)

    def converted(params: Any, width: int) -> History:
        model = with_params(built(wide), params)
        pure, params, model_state = pj.flax.nnx.split(model, loss_fn)
        step = _loops.train_step(pure, tx, width, mesh=wide, axis_name="host")
        rows = [step.batch(each, axis_name=("host", "fsdp")) for each in batches]
        key = jax.random.key(seed)
        state = step.init(params, model_state=model_state, rng=key, batch=rows[0])
        return _loops.converted(step, state, lambda i, _: (rows[i], None), steps)

    return Program(
        params=_params(built(mesh)),
        original=original,
        delayed=delayed,
        converted=converted,
    )


def _params(model: Any) -> Any:
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def _batches(rng: np.random.Generator, steps: int) -> list[dict[str, np.ndarray]]:
    """Returns packed sequences of random tokens, of which each has padding at its end.

    Half of them have two documents.
    """
    rows, length = 16, 16
    place = np.arange(length)

    def one() -> dict[str, np.ndarray]:
        tokens = rng.integers(1, 64, (rows, length + 1))
        end = rng.integers(length // 2, length + 1, (rows, 1))
        second = place >= np.where(np.arange(rows)[:, None] % 2, length, 4)
        tokens[:, :-1][place >= end] = 0
        return {
            "inputs": tokens[:, :-1].astype(np.int32),
            "targets": tokens[:, 1:].astype(np.int32),
            "inputs_position": np.where(second, place - 4, place).astype(np.int32),
            "inputs_segmentation": np.where(
                place < end, 1 + second.astype(np.int32), 0
            ).astype(np.int32),
        }

    return [one() for _ in range(steps)]
