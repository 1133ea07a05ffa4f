"""Finds when each gradient is computed, in the order of the traced program."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from pipejax._core.step import Common, Inputs, inputs_over, state_data_specs
from pipejax._internal.jaxpr import Constant, inlined, name_of
from pipejax._internal.types import ClosedJaxpr, Tree

from ._config import StepConfig


def ready_after(
    config: StepConfig, state: Common, in_flight: Any, inputs: Inputs
) -> Tree:
    """Returns for each gradient the share of the FLOPs after which it is computed.

    The FLOPs are those of the matmuls and convolutions of a step. Nothing is computed.
    """

    def local(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(config.step.compute, return_shape=True)(*args)
        shares = jax.tree.unflatten(jax.tree.structure(shape), _shares(closed))
        message, computed = shares
        gradients = message.gradients
        if computed.at_once is not None:
            gradients = _either(gradients, computed.at_once.gradients, args[0])
        # A `Partial` without arguments has no arrays, and keeps its function.
        return jax.tree_util.Partial(lambda: gradients)

    specs = (
        state_data_specs(state, config.axis_name),
        config.queue_specs,
        inputs_over(config.axis_name),
    )
    found: Callable[[], Tree] = jax.eval_shape(
        config.on_mesh(local, specs, P()), state, in_flight, inputs
    )
    return found()


def _either(late: Tree, at_once: Tree, state: Common) -> Tree:
    params = state.trainable.params
    return jax.tree.map(lambda _, a, b: b if a is None else a, params, late, at_once)


def _shares(closed: ClosedJaxpr) -> list[float]:
    """Returns for each result the share of the FLOPs after which it is computed."""
    from ._flops import flops_of  # imports jax.extend, which is slow

    names: dict[Any, Any] = {v: object() for v in closed.jaxpr.invars}
    done, after = 0.0, dict.fromkeys(names.values(), 0.0)
    for each in inlined(closed, names):
        done += flops_of(each.equation)
        after.update(dict.fromkeys(each.writes, done))
    results = [name_of(names, v) for v in closed.jaxpr.outvars]
    return [
        0.0 if isinstance(name, Constant) else after[name] / (done or 1.0)
        for name in results
    ]
