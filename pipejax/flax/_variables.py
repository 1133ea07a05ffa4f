"""The variables of an NNX model as nested dicts of arrays, and which of them change."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

from pipejax._internal.jaxpr import forwarded

Tree = dict[Any, Any]


def arrays(model: nnx.Module, only: Any) -> Tree:
    """Returns the values of the variables that an NNX filter selects, as kept."""
    return nnx.to_pure_dict(nnx.state(model, only), _raw)


def _raw(variable: Any) -> Any:
    """Returns the value of a variable as it is kept, which a read may change."""
    is_variable = isinstance(variable, nnx.Variable)
    return variable.get_raw_value() if is_variable else variable


def check_variables(model: nnx.Module) -> None:
    """Raises a `ValueError` for a variable whose value is a dict."""
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        if isinstance(_raw(variable), Mapping):
            name = ".".join(map(str, path))
            raise ValueError(
                "`model` must hold an array, or a tuple or list of arrays, in each"
                f" variable, because parameters are nested dicts; got a dict in {name}."
                " Make a variable of each entry, `nnx.Dict(w=nnx.Param(w), ...)`."
            )


def moved(after: Tree, before: Tree) -> set[Any]:
    """Returns the paths at which a pytree has other arrays than before."""
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(after),
        jax.tree.leaves(before),
        strict=True,
    )
    return {path for (path, new), old in pairs if new is not old}


def as_given(run: Callable[..., Any], given: Any, found: Any) -> Any:
    """Returns the results of `run`, with what it hands on unchanged as it was given.

    The results have the form of the arguments.
    """
    sources = forwarded(jax.make_jaxpr(run)(*given))
    results, structure = jax.tree.flatten(found)
    triples = zip(results, jax.tree.leaves(given), sources, strict=True)
    return jax.tree.unflatten(
        structure,
        [old if i == source else new for i, (new, old, source) in enumerate(triples)],
    )


def assigned(moved: set[Any]) -> ValueError:
    """Returns the error that a loss assigns trained variables, given by paths."""
    names = sorted(jax.tree_util.keystr(path) for path in moved)
    return ValueError(
        "`loss_fn` must leave the variables that are trained as they are, because only"
        f" the optimizer moves them; got other values of {names}."
        " Clip or normalize parameters in `tx`, for example by"
        " optax.keep_params_nonnegative, and compute normalized weights without"
        " assigning them: nnx.WeightNorm and nnx.SpectralNorm assign them."
    )
