"""Tests messages: passengers by name, means by weight, and the dtypes that travel."""

import jax
import jax.numpy as jnp
import numpy as np

from pipejax._core.message import Message, Passengers, mean_as, mean_of, travelling

from ...helpers import assert_bits_equal, x64

METRICS = {"accuracy": jnp.float32(0.25), "norms": (jnp.int32(3), jnp.bfloat16(1.5))}


def test_passengers_are_a_vector_of_loss_weight_and_metrics():
    """A float32 vector holds the loss, the weight and the metrics in order."""
    loss, weight = jnp.float16(2.5), jnp.float32(64)
    passengers = Passengers.of(loss, METRICS, weight)
    np.testing.assert_array_equal(
        passengers.values, np.float32([2.5, 64, 0.25, 3, 1.5])
    )
    assert passengers.values.dtype == jnp.float32
    assert (passengers.loss, passengers.weight) == (2.5, 64)
    assert passengers.metrics == {"accuracy": 0.25, "norms": (3, 1.5)}
    metrics = ["metrics['accuracy']", "metrics['norms'][0]", "metrics['norms'][1]"]
    assert passengers.names == ["loss", "weight", *metrics]


def test_passengers_may_have_no_weight():
    passengers = Passengers.of(jnp.float32(1), METRICS)
    np.testing.assert_array_equal(passengers.values, np.float32([1, 0.25, 3, 1.5]))
    assert passengers.weight is None
    assert passengers.names[:2] == ["loss", "metrics['accuracy']"]
    assert passengers.metrics["norms"] == (3, 1.5)


def test_passengers_are_added_as_one_array():
    """Passengers of two devices are added as one array."""
    first = Passengers.of(jnp.float32(1), METRICS, jnp.float32(2))
    second = Passengers.of(jnp.float32(3), METRICS, jnp.float32(4))
    total = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b))(first, second)
    assert (total.loss, total.weight, total.metrics["accuracy"]) == (4, 6, 0.5)
    assert len(jax.tree.leaves(first)) == 1


def weighted(weight):
    return Message(
        {}, passengers=Passengers.of(jnp.float32(0), {}, jnp.float32(weight))
    )


def test_mean_divides_by_devices_or_by_their_weights():
    total = jnp.array([6.0, -9.0])
    plain = Message({}, passengers=Passengers.of(jnp.float32(0), {}))
    np.testing.assert_array_equal(mean_of(total, plain, 3), [2, -3])
    np.testing.assert_array_equal(mean_of(total, Message({}), 2), [3, -4.5])
    np.testing.assert_array_equal(mean_of(total, weighted(12), 3), [0.5, -0.75])
    # All weights are zero: the sum is zero, and so is the mean.
    np.testing.assert_array_equal(mean_of(0 * total, weighted(0), 3), [0, 0])


def test_mean_keeps_the_dtype_of_the_sum():
    """The weight keeps its dtype: in bfloat16, 257 would be 256, and the mean 2."""
    total = jnp.array([512], jnp.bfloat16)
    found = mean_of(total, weighted(257), 1)
    assert_bits_equal(found, jnp.array([512 / 257], jnp.bfloat16))
    assert found[0] < 2
    with x64():
        wide = mean_of(jnp.array([1.0], jnp.float64), weighted(3), 1)
        assert_bits_equal(wide, jnp.array([1 / 3], jnp.float64))


def test_scalars_travel_as_vectors_and_are_restored():
    tree = {"scale": jnp.float32(1.5), "w": jnp.ones((2, 3), jnp.float16), "none": None}
    sent = travelling(tree, jnp.bfloat16)
    shapes = {name: x.shape for name, x in sent.items() if x is not None}
    assert shapes == {"scale": (1,), "w": (2, 3)}
    assert {x.dtype for x in jax.tree.leaves(sent)} == {jnp.dtype("bfloat16")}
    assert_bits_equal(mean_as(sent, tree, Message(sent), 1), tree)
    own = travelling(tree, None)
    assert (own["scale"].dtype, own["w"].dtype) == (jnp.float32, jnp.float16)


def test_mean_may_have_a_sum_beyond_its_dtype():
    """The sum is divided in the wider dtype, with a weight too, and then cast."""
    sums = {"w": jnp.full((1,), 3 * 40000, jnp.float32)}
    like = {"w": jnp.zeros((), jnp.float16)}
    wanted = {"w": jnp.float16(40000)}
    assert_bits_equal(mean_as(sums, like, Message(sums), 3), wanted)
    one = Passengers.of(jnp.float32(1), None, jnp.float32(3))
    assert_bits_equal(mean_as(sums, like, Message(sums, None, one), 8), wanted)


def test_complex_numbers_travel_as_pairs():
    tree = {
        "a": jnp.complex64([1 + 2j, 3 - 4j]),
        "b": jnp.complex64(5j),
        "c": jnp.ones(1),
    }
    sent = travelling(tree, jnp.bfloat16)
    assert {name: x.shape for name, x in sent.items()} == {
        "a": (2, 2),
        "b": (1, 2),
        "c": (1,),
    }
    assert {x.dtype.name for x in sent.values()} == {"bfloat16"}
    sums = jax.tree.map(lambda x: 4 * x, sent)
    found = mean_as(sums, tree, Message(None), 4)
    assert_bits_equal(found, tree)


def test_complex128_travels_as_pairs_of_float64():
    with x64():
        tree = jnp.complex128(1 / 3 + 2j / 3)
        sent = travelling(tree, None)
        assert (sent.shape, sent.dtype) == ((1, 2), np.dtype("float64"))
        assert_bits_equal(mean_as(2 * sent, tree, Message(None), 2), tree)
