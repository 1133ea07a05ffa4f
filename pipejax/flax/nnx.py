"""Trains a Flax NNX model: `split` makes a pure loss, `update` writes the result back.

Parameters, model state and optimizer state are nested dicts of arrays here, not
`nnx.State` objects. Any Optax transformation and any checkpoint library accepts them.
Labels and masks of an optimizer must be nested dicts then, too:
`nnx.to_pure_dict(labels)`.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from flax import nnx
from flax.errors import TraceContextError

import pipejax as pj
from pipejax._internal.structures import paths, shapes

from ._drained import check_drained
from ._variables import Tree, arrays, as_given, assigned, check_variables, moved


def split(
    model: nnx.Module, loss_fn: Callable[..., Any], *, wrt: Any = nnx.Param
) -> tuple[Callable[..., Any], Tree, Tree]:
    """Splits a model and a loss on it into a pure loss function and its arguments.

    A train step needs a pure function of arrays, whereas an NNX model changes its
    arrays in place. `flax.nnx.split` splits only the model.

    If the loss or the model draws random numbers, pass `rng` to `train.init`, a key or
    a dict of keys. In each step, the pure loss makes `rngs = nnx.Rngs(key)`, or
    `nnx.Rngs(**keys)` from a dict. Each kind of random stream in the model (such as
    "dropout") starts from one draw of its name from `rngs`, in alphabetical order, and
    then the loss receives `rngs`. The streams in the model state do not change.

    Args:
      model: The model in the mode in which to train it, usually after `model.train()`.
        It is not changed.
      loss_fn: `loss_fn(model, batch)`. It returns the loss, `(loss, metrics)` or
        `(loss, pj.Aux(metrics=..., weight=...))`. If it has an argument `rngs`, it
        receives an `nnx.Rngs` as this keyword, to pass on to the model. What
        `train.step` is given as `shared`, it receives as the keyword `shared`.
      wrt: The variables to train, as in `nnx.Optimizer`: a type such as
        `nnx.LoRAParam`, or any NNX filter. All other variables are model state. Those
        that the loss does not change are not sent: pass `batch` to `train.init`.

    Returns:
      A tuple `(pure_loss_fn, params, model_state)`: a function for
      `pj.make_train_step` or `pj.make_local_step`, and nested dicts of arrays for
      `train.init`.

    Raises:
      ValueError: Later, from the train step: if random numbers are drawn without `rng`,
        if `loss_fn` changes a variable that is trained, or more of the model than the
        values of other variables, or if it returns a `pj.Aux` that sets `model_state`.

    Examples:
      >>> import jax.numpy as jnp, optax, pipejax as pj
      >>> import pipejax.flax.nnx
      >>> from flax import nnx
      >>> def loss_fn(model, batch):
      ...     return 0.5 * jnp.mean((model(batch) - 1) ** 2)
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> pure_loss_fn, params, model_state = pj.flax.nnx.split(model, loss_fn)
      >>> tx = optax.sgd(0.1)
      >>> train = pj.make_train_step(pure_loss_fn, tx, mesh=pj.data_mesh(1))
      >>> state = train.init(params, model_state=model_state)
      >>> state, _ = train.step(state, jnp.zeros((4, 2)))
      >>> state, _ = train.drain(state)
      >>> pj.flax.nnx.update(model, state)
      >>> print(f"{float(model.bias[0]):.1f}")
      0.1
    """
    graph = nnx.graphdef(model)
    check_variables(model)
    parameters = inspect.signature(loss_fn).parameters
    takes_rngs = "rngs" in parameters
    needs_rngs = takes_rngs and parameters["rngs"].default is inspect.Parameter.empty

    def pure_loss_fn(
        params: Any,
        batch: Any,
        *,
        model_state: Any,
        rng: Any = None,
        shared: Any = None,
    ) -> tuple[jax.Array, pj.Aux]:
        if rng is None and needs_rngs:
            raise _no_rng("takes `rngs`")

        def run(params: Tree, model_state: Tree) -> tuple[Any, tuple[Tree, Tree]]:
            model = nnx.merge(graph, params, model_state)
            given = {} if shared is None else {"shared": shared}
            if rng is not None:
                rngs = _rngs(rng)
                nnx.reseed(model, policy="match_shape", **_stream_keys(model, rngs))
                given |= {"rngs": rngs} if takes_rngs else {}
            out = _called(loss_fn, model, batch, **given)
            _check_graph(model, graph, model_state, wrt)
            return out, (arrays(model, wrt), arrays(model, nnx.Not(wrt)))

        out, (trained, rest) = run(params, model_state)
        drawn = streams if rng is not None else set()
        if moved(trained, params) or moved(rest, model_state) - drawn - averages:
            # A transformation such as `nnx.remat` returns what it does not change, too.
            trained, rest = as_given(
                lambda *args: run(*args)[1], (params, model_state), (trained, rest)
            )
        if changed := moved(trained, params):
            raise assigned(changed)
        if rng is None and moved(rest, model_state) & streams:
            raise _no_rng("draws from the random streams of the model")
        # Each device has drawn from its own random streams. The next state must be the
        # same on all devices, so it keeps the streams from before the step.
        rest = jax.tree_util.tree_map_with_path(
            lambda path, new, old: old if path in streams else new, rest, model_state
        )
        loss, aux = _loss_and_aux(out)
        return loss, aux._replace(model_state=rest)

    streams = paths(arrays(model, nnx.RngState))
    averages = paths(arrays(model, nnx.BatchStat))
    described: Any = pure_loss_fn
    described.__signature__ = _signature(pure_loss_fn, parameters)
    return pure_loss_fn, arrays(model, wrt), arrays(model, nnx.Not(wrt))


def opt_state(optimizer: nnx.Optimizer) -> optax.OptState:
    """Returns the Optax state that an `nnx.Optimizer` holds.

    The attribute `optimizer.opt_state` holds `nnx` objects, which `train.init` refuses.

    Args:
      optimizer: An `nnx.Optimizer` over the variables that were passed to `split` as
        `wrt`.

    Returns:
      The state to pass to `train.init(params, opt_state=...)`, where `train` was made
      with `optimizer.tx`. It shares the arrays of `optimizer`.
    """
    return jax.tree.map(
        lambda node: nnx.to_pure_dict(node) if isinstance(node, nnx.State) else node,
        nnx.as_pure(optimizer.opt_state),
        is_leaf=lambda node: isinstance(node, nnx.State),
    )


def update(model: nnx.Module, state: pj.PipelineState | pj.LocalState) -> None:
    """Writes the trained parameters and model state into the model, in place.

    Args:
      model: The model that was passed to `split`.
      state: A state with nothing in flight, from `train.drain`. After local steps,
        the model gets the anchor. The model shares arrays with `state`. A later step
        from the same state with `donate=True` would delete them.

    Raises:
      ValueError: If `state` has not been drained.
    """
    check_drained(state)
    nnx.update(model, state.params, state.model_state or {})


def _signature(pure_loss_fn: Any, own: Mapping[str, inspect.Parameter]) -> Any:
    """Returns the signature of a pure loss: it takes `shared` as `loss_fn` does."""
    found = inspect.signature(pure_loss_fn)
    parameters = dict(found.parameters)
    if all(x.kind is not x.VAR_KEYWORD for x in own.values()):
        shared = parameters.pop("shared")
        if "shared" in own:
            parameters["shared"] = shared.replace(default=own["shared"].default)
    return found.replace(parameters=[*parameters.values()])


def _called(loss_fn: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    try:
        return loss_fn(*args, **keywords)
    except TraceContextError as error:
        raise ValueError(
            "`loss_fn` must not change an object that it is not passed, such as an"
            " nnx.Rngs from outside, because it is traced; got"
            f" {type(error).__name__}: {str(error).partition(' (https:')[0]}. To draw"
            " random numbers, let it take a keyword, `loss_fn(model, batch, rngs)`, and"
            " give `train.init` an `rng`."
        ) from error


def _stream_keys(model: nnx.Module, rngs: nnx.Rngs) -> dict[str, Any]:
    nodes = (node for _, node in nnx.iter_graph(model))
    names = {node.tag for node in nodes if isinstance(node, nnx.RngStream)}
    if missing := sorted(names - {*rngs}) if "default" not in rngs else []:
        raise ValueError(
            "`rng` must have a key for each kind of random stream in the model, or one"
            f" named 'default'; got none for {missing}. Pass a single key, or add"
            f" `{missing[0]!r}: jax.random.key(0)`."
        )
    return {name: rngs[name]() for name in sorted(names)}


def _rngs(rng: Any) -> nnx.Rngs:
    if isinstance(rng, dict):
        return nnx.Rngs(**rng)
    if isinstance(rng, jax.Array):
        return nnx.Rngs(rng)
    raise ValueError(
        "`rng` must be a PRNG key or a dict of keys by the names of random streams, got"
        f" a {type(rng).__name__}. Pass `jax.random.key(0)`."
    )


def _loss_and_aux(out: Any) -> tuple[Any, pj.Aux]:
    if not isinstance(out, tuple) or len(out) != 2:
        return out, pj.Aux()  # the train step refuses a loss that is not a scalar
    loss, aux = out
    if not isinstance(aux, pj.Aux):
        return loss, pj.Aux(metrics=aux)
    if aux.model_state is not None:
        raise ValueError(
            "`loss_fn` must leave `model_state` to the model, which holds it already;"
            " got a pj.Aux that sets it. Return `pj.Aux(metrics=..., weight=...)`."
        )
    return loss, aux


def _no_rng(what: str) -> ValueError:
    return ValueError(
        f"`rng` must be given to `train.init`, because `loss_fn` {what}; got None. Call"
        " `train.init(params, model_state=model_state, rng=jax.random.key(0))`. Every"
        " device then gets its own random numbers in every step."
    )


def _check_graph(model: nnx.Module, graph: Any, before: Tree, wrt: Any) -> None:
    if nnx.graphdef(model) == graph:
        return
    old, new = shapes(before).keys(), shapes(arrays(model, nnx.Not(wrt))).keys()
    found = [f"a new variable model{path}" for path in sorted(new - old)]
    found += [f"a lost variable model{path}" for path in sorted(old - new)]
    raise ValueError(
        "`loss_fn` must change nothing in the model but the values of its variables,"
        " because the next step would not see the change; got"
        f" {', '.join(found) or 'an attribute that has changed'}. Call `model.train()`"
        " before `split`, keep a counter in an nnx.Variable, and remove sown values"
        " with `nnx.pop(model, nnx.Intermediate)`."
    )
