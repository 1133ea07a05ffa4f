"""Tests how the inputs of a step are split."""

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from pipejax._core.step import Inputs, InputSpecs, inputs_over


def test_specs_have_no_leaves():
    inputs = Inputs(np.ones(2), None, InputSpecs((P("fsdp"),)))
    assert len(jax.tree.leaves(inputs)) == 1
    assert hash(jax.tree.structure(inputs)) is not None


def test_batch_is_split_and_a_shared_input_is_not():
    inputs = Inputs({"x": 1, "y": 2}, (3,), InputSpecs((P("fsdp"), P()), (P(),)))
    specs = inputs_over(("host", "device"))
    found = jax.tree.map(
        lambda spec, part: jax.tree.map(lambda _: spec, part),
        specs,
        inputs,
        is_leaf=lambda node: isinstance(node, P),
    )
    assert found.batch == {"x": P(("host", "device")), "y": P(("host", "device"))}
    assert found.shared == (P(),)
