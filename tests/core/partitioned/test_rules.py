"""Tests how single operations run on pieces, against the operations on whole arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax._core.partitioned import Devices, NotElementwiseError, whole
from pipejax._core.partitioned._rules import is_elementwise, rule_of

DEVICES = Devices({"host": 2, "device": 2})
ROWS = (("host", "device"), ())
X = np.arange(24, dtype=np.float32).reshape(8, 3)


def equation(function, *args):
    """Returns the last equation of a traced function."""
    return jax.make_jaxpr(function)(*args).jaxpr.eqns[-1]


def on_partitions(function, splits, *args):
    """Runs an operation of whole arrays on pieces, and returns its whole result."""
    rule = rule_of(equation(function, *args), splits, DEVICES)

    def local(*args):
        own = [DEVICES.piece(x, s) for x, s in zip(args, splits, strict=True)]
        (result,) = rule.run(*own)
        if rule.sent is not None:
            result = rule.finish(jax.lax.psum(result, DEVICES.names))
        return result

    mapped = jax.shard_map(
        local,
        mesh=pj.data_mesh(4, axis_name=("host", "device"), hosts=2),
        in_specs=P(),
        out_specs=P(*(names or None for names in rule.splits[0])),
        check_vma=False,
    )
    return jax.jit(mapped)(*args)


@pytest.mark.parametrize(
    ("function", "splits"),
    [
        (jax.lax.exp, [ROWS]),
        (jax.lax.mul, [ROWS, ROWS]),
        (jax.lax.mul, [ROWS, whole(2)]),
        (lambda x: x.astype(jnp.bfloat16), [ROWS]),
        (lambda x: x.sum(axis=1), [ROWS]),
        (jnp.sum, [ROWS]),
        (lambda x: jax.lax.broadcast_in_dim(x, (2, 8, 3), (1, 2)), [ROWS]),
    ],
)
def test_results_on_pieces_equal_whole_arrays(function, splits):
    args = [X / 24] * len(splits)
    wanted = jax.jit(function)(*args)
    found = on_partitions(function, splits, *args)
    np.testing.assert_allclose(
        np.float32(found), np.float32(wanted), rtol=1e-6, strict=True
    )


@pytest.mark.parametrize("bad", [None, 0, 23])
@pytest.mark.parametrize("reduce", [jnp.all, jnp.any])
def test_all_and_any_on_pieces_equal_whole_arrays(reduce, bad):
    x = np.full(24, reduce is jnp.all)
    if bad is not None:
        x[bad] = not x[bad]
    x = x.reshape(8, 3)
    assert on_partitions(reduce, [ROWS], x) == reduce(x)


def test_piece_on_several_devices_counts_once():
    """Devices along the second axis have the same piece."""
    assert on_partitions(jnp.sum, [(("host",), ())], X) == X.sum()


@pytest.mark.parametrize(
    ("function", "splits", "said"),
    [
        (lambda x: x.T, [ROWS], "transpose"),
        (jnp.prod, [ROWS], "reduce_prod"),
        (jax.lax.add, [ROWS, ((), ("host",))], "add of arrays split apart"),
    ],
)
def test_operation_without_a_rule_is_named(function, splits, said):
    with pytest.raises(NotElementwiseError, match=said):
        rule_of(equation(function, *[X] * len(splits)), splits, DEVICES)


def test_operation_is_elementwise_only_with_split_operands():
    found = equation(jax.lax.add, X, X)
    assert is_elementwise(found, [ROWS, whole(2)])
    assert not is_elementwise(found, [whole(2), whole(2)])
    assert not is_elementwise(equation(jnp.transpose, X), [ROWS])


def test_shapes_of_pieces_are_divided_along_split_axes():
    assert DEVICES.shape((8, 3), ROWS) == (2, 3)
    assert DEVICES.count(("host", "device")) == 4


def test_sum_of_integers_has_the_announced_dtype():
    """With 64 bits enabled, JAX sums integers of 32 bits in 64."""
    with jax.enable_x64(True):
        numbers = np.arange(24, dtype=np.int32).reshape(8, 3)
        traced = equation(lambda x: jnp.sum(x, dtype=jnp.int32), numbers)
        rule = rule_of(traced, [ROWS], DEVICES)

        def local(x):
            (own,) = rule.run(DEVICES.piece(x, ROWS))
            assert own.dtype == rule.sent.dtype == jnp.int32
            return jax.lax.psum(own, DEVICES.names)

        mesh = pj.data_mesh(4, axis_name=("host", "device"), hosts=2)
        mapped = jax.shard_map(
            local, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
        )
        assert jax.jit(mapped)(numbers) == 276
