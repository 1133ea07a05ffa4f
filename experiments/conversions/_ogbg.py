"""Flax's ogbg_molpcba: padded graphs, and a mean over the labels that are known."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import jraph
import numpy as np

import pipejax as pj

from . import _loops
from ._program import Conversion, History, Program
from ._sources import function, load

FOLDER = "flax"
GRAPHS = 2  # real graphs for each device
CONVERSION = Conversion(
    changed=(
        "import pipejax",
        "train_step becomes a loss: `params, batch, *, rng`",
        "its graphs are the device's row of the batch",
        "the logits are computed with `params` and `rng`",
        "it returns pj.Aux, whose weight is the number of known labels",
        "make_train_step",
        "train.init, with one batch",
        "a batch stacks the next four padded graphs of the iterator",
        "train.step",
        "train.drain at the end",
    ),
    around=(
        "the infos of the steps are kept in a list, in place of clu's sums",
        "the list begins",
        "the list begins again",
        "pj.mean_info of the list is logged",
        "a TrainState of the state for the checkpoint",
    ),
    keys="dropout is off: the program draws it for all graphs at once",
)


def program(sources: pathlib.Path, steps: int, seed: int) -> Program:
    """Makes the program, on random graphs and without dropout."""
    folder = sources / FOLDER / "examples" / "ogbg_molpcba"
    clu = ("checkpoint", "metric_writers", "parameter_overview", "periodic_actions")
    stubs = ("tensorflow", "input_pipeline", *(f"clu.{name}" for name in clu))
    train, default = load((folder,), ("train", "configs.default"), stubs)
    config = default.get_config()
    config.latent_size, config.message_passing_steps, config.num_classes = 16, 2, 4
    config.dropout_rate = 0.0
    net, tx = train.create_model(config, False), train.create_optimizer(config)
    rng = np.random.default_rng(seed)
    graphs = [
        [_graph(rng, config.num_classes) for _ in range(_loops.DEVICES * GRAPHS)]
        for _ in range(steps)
    ]
    whole = [_padded(each) for each in graphs]
    rows = [
        jax.tree.map(
            lambda *leaves: np.stack(leaves),
            *(_padded(each[i : i + GRAPHS]) for i in range(0, len(each), GRAPHS)),
        )
        for each in graphs
    ]
    params = net.init(jax.random.key(seed), train.replace_globals(whole[0]))
    start = train.train_state.TrainState.create(
        apply_fn=net.apply, params=params, tx=tx
    )
    rngs = {"dropout": jax.random.key(seed)}
    cut = function(
        (folder / "train.py").read_text(),
        "train_step",
        vars(train),
        before="grad_fn",
        returns="loss_fn(state.params, graphs)",
    )

    def losses(params: Any, graphs: Any) -> Any:
        """Returns the mean loss, and how many labels are known and found."""
        loss, rest = cut(start.replace(params=params), graphs, rngs)
        _, logits, labels, mask = rest
        right = train.predictions_match_labels(logits=logits, labels=labels)
        known = mask.sum()
        return loss, (jnp.where(mask, right, 0).sum() / known, known)

    def original(params: Any) -> History:
        state, history = start.replace(params=params), History([], [])
        for each in whole:
            state, metrics = train.train_step(state, each, rngs)
            found = metrics.compute()
            history.params.append(state.params)
            history.reported.append((found["loss"], {"accuracy": found["accuracy"]}))
        return history

    @jax.jit
    def gradient(params: Any, graphs: Any) -> Any:
        out = jax.value_and_grad(losses, has_aux=True)(params, graphs)
        (loss, (accuracy, _)), gradients = out
        return (loss, {"accuracy": accuracy}), gradients

    def delayed(params: Any) -> History:
        return _loops.delayed(gradient, tx, params, lambda i, _: whole[i], steps)

    def loss_fn(params: Any, batch: Any) -> Any:
        graphs = jax.tree.map(lambda x: x[0], batch)
        loss, (accuracy, known) = losses(params, graphs)
        return loss, pj.Aux(metrics={"accuracy": accuracy}, weight=known)

    def converted(params: Any, width: int) -> History:
        step = _loops.train_step(loss_fn, tx, width)
        state = step.init(params, batch=rows[0])
        return _loops.converted(step, state, lambda i, _: (rows[i], None), steps)

    return Program(
        params=params,
        original=original,
        delayed=delayed,
        converted=converted,
    )


def _graph(rng: np.random.Generator, labels: int) -> Any:
    """Returns a molecule with random features, of which some labels are unknown."""
    nodes, edges = rng.integers(3, 7), rng.integers(4, 9)
    found = rng.integers(0, 2, (1, labels)).astype(np.float32)
    found[0, 1:][rng.random(labels - 1) < 0.3] = np.nan
    return jraph.GraphsTuple(
        nodes=rng.normal(size=(nodes, 9)).astype(np.float32),
        edges=rng.normal(size=(edges, 3)).astype(np.float32),
        senders=rng.integers(0, nodes, edges),
        receivers=rng.integers(0, nodes, edges),
        n_node=np.array([nodes]),
        n_edge=np.array([edges]),
        globals=found,
    )


def _padded(graphs: Any) -> Any:
    """Returns one container of a size that depends on the number of graphs alone."""
    count = len(graphs)
    return jraph.pad_with_graphs(
        jraph.batch_np(graphs), 6 * count + 1, 8 * count, count + 1
    )
