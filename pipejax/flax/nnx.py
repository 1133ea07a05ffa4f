"""A Flax NNX model into a train step, and back.

- `split`: a pure loss, the parameters, and all else the model holds (batch statistics,
  random streams) as the model state
- `opt_state`: the state of an `nnx.Optimizer`, to go on from
- `update`: writes parameters and model state back into the model

All are nested dicts of arrays, so that any Optax transformation and any checkpoint
library takes them.
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import optax
from flax import nnx
from flax.errors import TraceContextError

import pipejax as pj

from ._drained import check_drained

Tree = dict[Any, Any]


def split(
    model: nnx.Module, loss_fn: Callable[..., Any], *, wrt: Any = nnx.Param
) -> tuple[Callable[..., Any], Tree, Tree]:
    """Splits a model and a loss on it into a pure loss and its arguments.

    Args:
      model: as it shall train: after `model.train()`. It is not changed.
      loss_fn: `loss_fn(model, batch)` returns the loss, `(loss, metrics)` or
        `(loss, pj.Aux(metrics=..., weight=...))`. If it has an argument `rngs`, it is
        passed an `nnx.Rngs` as that keyword, to call the model with.
      wrt: the variables to train, as for `nnx.Optimizer`: a type such as
        `nnx.LoRAParam`, or any NNX filter. All others are model state.

    Returns:
      `pure_loss_fn, params, model_state` for

          train = pj.make_train_step(pure_loss_fn, tx, mesh=mesh)
          state = train.init(params, model_state=model_state, rng=jax.random.key(0))

      `rng` is needed where the model or the loss draws random numbers. From the key
      that a device has for a step, `rngs = nnx.Rngs(key)`: every kind of random stream
      in the model ("dropout") starts from a draw of it, in the order of their names,
      and then the loss is passed `rngs`. The streams in `model_state` stay as they are.

    Raises:
      ValueError: from the train step: without `rng` where random numbers are drawn, and
        where `loss_fn` changes the model beyond the values of its variables.
    """
    graph = nnx.graphdef(model)
    takes_rngs = "rngs" in inspect.signature(loss_fn).parameters

    def pure_loss_fn(
        params: Any, batch: Any, *, model_state: Any, rng: jax.Array | None = None
    ) -> tuple[jax.Array, pj.Aux]:
        model = nnx.merge(graph, params, model_state)
        streams = _arrays(model, nnx.RngState)
        given = {}
        if rng is not None:
            rngs = nnx.Rngs(rng)
            nnx.reseed(model, policy="match_shape", **_stream_keys(model, rngs))
            given = {"rngs": rngs} if takes_rngs else {}
        elif takes_rngs:
            raise _no_rng("takes `rngs`")
        out = _called(loss_fn, model, batch, **given)
        if rng is None and _changed(_arrays(model, nnx.RngState), streams):
            raise _no_rng("draws from the random streams of the model")
        _check_graph(model, graph, model_state, wrt)
        # Each device has its own until here. What is carried on must be the same.
        nnx.update(model, streams)
        loss, aux = _loss_and_aux(out)
        return loss, aux._replace(model_state=_arrays(model, nnx.Not(wrt)))

    return pure_loss_fn, _arrays(model, wrt), _arrays(model, nnx.Not(wrt))


def opt_state(optimizer: nnx.Optimizer) -> optax.OptState:
    """Returns the Optax state that an `nnx.Optimizer` holds, to go on from.

    Args:
      optimizer: over the variables that `split` was given as `wrt`.

    Returns:
      What `train.init(params, opt_state=...)` takes, where `train` was made with
      `optimizer.tx`. The arrays are shared, and `train.init` copies them.
    """
    return jax.tree.map(
        lambda node: nnx.to_pure_dict(node) if isinstance(node, nnx.State) else node,
        nnx.as_pure(optimizer.opt_state),
        is_leaf=lambda node: isinstance(node, nnx.State),
    )


def update(model: nnx.Module, state: pj.PipelineState) -> None:
    """Writes what was trained into the model, in place.

    Args:
      model: as `split` was given it.
      state: from `train.drain`. Its arrays are shared, not copied: a step made with
        `donate=True` from the same state would take them away.

    Raises:
      ValueError: if gradients are still in flight.
    """
    check_drained(state)
    nnx.update(model, state.params, state.model_state or {})


def _arrays(model: nnx.Module, only: Any) -> Tree:
    return nnx.to_pure_dict(nnx.state(model, only))


def _called(loss_fn: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    try:
        return loss_fn(*args, **keywords)
    except TraceContextError as error:
        raise ValueError(
            "`loss_fn` must not change what it has not been passed, such as an nnx.Rngs"
            f" from outside, because it is traced; got {type(error).__name__}:"
            f" {str(error).partition(' (https:')[0]}. For call-time random numbers let"
            " it take a keyword, `loss_fn(model, batch, rngs)`, and give `train.init`"
            " an `rng`."
        ) from error


def _stream_keys(model: nnx.Module, rngs: nnx.Rngs) -> dict[str, Any]:
    """Draws a key for each name of a random stream in the model."""
    nodes = (node for _, node in nnx.iter_graph(model))
    names = {node.tag for node in nodes if isinstance(node, nnx.RngStream)}
    return {name: rngs() for name in sorted(names)}


def _changed(after: Tree, before: Tree) -> bool:
    pairs = zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True)
    return any(a is not b for a, b in pairs)


def _loss_and_aux(out: Any) -> tuple[Any, pj.Aux]:
    """Returns what the user's loss returned as a loss and a `pj.Aux`."""
    if not isinstance(out, tuple) or len(out) != 2:
        return out, pj.Aux()  # the train step refuses what is no scalar
    loss, aux = out
    if not isinstance(aux, pj.Aux):
        return loss, pj.Aux(metrics=aux)
    if aux.model_state is not None:
        raise ValueError(
            "`loss_fn` must leave `model_state` to the model, which holds it; got a"
            " pj.Aux with one. Return `pj.Aux(metrics=..., weight=...)`."
        )
    return loss, aux


def _no_rng(what: str) -> ValueError:
    return ValueError(
        f"`rng` must be given to `train.init`, because `loss_fn` {what}; got None. Call"
        " `train.init(params, model_state=model_state, rng=jax.random.key(0))`, from"
        " which every device and step gets random numbers of its own."
    )


def _check_graph(model: nnx.Module, graph: Any, before: Tree, wrt: Any) -> None:
    """Raises a ValueError unless the model has the variables and attributes it had."""
    if nnx.graphdef(model) == graph:
        return
    old, new = _paths(before), _paths(_arrays(model, nnx.Not(wrt)))
    found = [f"a new variable model{path}" for path in sorted(new - old)]
    found += [f"a lost variable model{path}" for path in sorted(old - new)]
    raise ValueError(
        "`loss_fn` must leave the model as it is, but for the values of its variables,"
        " because the next step would not know of it; got"
        f" {', '.join(found) or 'an attribute that has changed'}. Call `model.train()`"
        " before `split`, keep a counter in an nnx.Variable, and take what is sown out"
        " again with `nnx.pop(model, nnx.Intermediate)`."
    )


def _paths(tree: Tree) -> set[str]:
    return {
        jax.tree_util.keystr(path)
        for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    }
