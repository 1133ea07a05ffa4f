"""Keeps specs inside a loss function to inner axes.

A model may split activations by rules, from logical names of axes to mesh axes:
`[("batch", ("host", "fsdp"))]`. Under `jax.jit`, such a rule names the axes of the data
too. Inside a group, arrays are not split over these, and JAX raises an error.
"""

import contextlib
import re
import sys
from collections.abc import Iterator
from typing import Any

import jax

from pipejax._internal.mesh import axes


def axes_of_data() -> tuple[str, ...]:
    """Returns the mesh axes that specs inside the loss must not name."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


@contextlib.contextmanager
def rules_of_group() -> Iterator[None]:
    """Leaves the axes of the data out of the rules that the caller has set in Flax."""
    flax: Any = sys.modules.get("flax.core.spmd")  # of Linen and NNX
    rules = flax.get_logical_axis_rules() if flax else ()
    if not rules:
        yield
        return
    with flax.logical_axis_rules([(name, _inner(entry)) for name, entry in rules]):
        yield


def axis_rule_error(error: ValueError) -> ValueError | None:
    """Returns an error with a remedy if JAX refuses a spec with an axis of data."""
    found = re.search(
        r"Got (?:spec=|PartitionSpec: )(P\(.*?\)) (?:and|with)", str(error)
    )
    named = [name for name in axes_of_data() if found and f"'{name}'" in found[1]]
    if not found or not named:
        return None
    return ValueError(
        f"`loss_fn` must not name {named[0]!r} in partition specs, because it runs"
        f" separately in each group along this axis of the mesh; got {found[1]}. Leave"
        f" {named[0]!r} out of the spec, or out of the rules for logical axes that it"
        " comes from."
    )


def _inner(entry: Any) -> Any:
    """Returns the mesh axes of a rule without the axes of the data."""
    kept = tuple(name for name in axes(entry or ()) if name not in axes_of_data())
    return kept if kept and not isinstance(entry, str) else (kept or (None,))[0]
