"""Corrections as transformations: what they do to a sequence of gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pipejax as pj
from pipejax import corrections, stability

from ..helpers import assert_bits_equal, batches, init_params, loss_fn

TREE = {"a": jnp.array([1.0, -2.0]), "b": jnp.array(3.0)}

BY_WIDTH = {
    "average": corrections.average_gradients,
    "extrapolate": lambda width: corrections.extrapolate_updates(width - 1),
    "staleness": corrections.scale_by_staleness,
    "compensate": corrections.delay_compensation,
    "robust": functools.partial(corrections.delay_robust, 0.9),
}


def outputs(tx, gradients, params=None):
    """What `tx` makes of each gradient, applied to the parameters as it goes."""
    params = jnp.float32(0) if params is None else params
    state, found = tx.init(params), []
    for gradient in gradients:
        update, state = tx.update(jnp.float32(gradient), state, params)
        params = params + update
        found.append(float(update))
    return found


def test_average_is_over_what_there_is():
    tx = corrections.average_gradients(3)
    assert outputs(tx, [3, 6, 9, 12, 0]) == [3, 4.5, 6, 9, 7]


def test_average_of_one_is_the_gradient():
    assert outputs(corrections.average_gradients(1), [3, 6]) == [3, 6]


def test_extrapolation_adds_what_the_guess_got_wrong():
    tx = corrections.extrapolate_updates(2)
    # d + 2 (d - the one before), 0 at first.
    assert outputs(tx, [1, 1, 4, 0]) == [3, 1, 10, -8]


def test_extrapolation_by_none_changes_nothing():
    assert outputs(corrections.extrapolate_updates(0), [1, -5]) == [1, -5]


def test_unextrapolated_parameters_are_those_of_the_plain_recursion():
    """The parameters in the loop are `steps` updates ahead of the plain ones."""
    tx = optax.chain(optax.sgd(0.1), corrections.extrapolate_updates(1.5))
    x = y = TREE
    state = tx.init(y)
    rng = np.random.default_rng(0)
    for _ in range(5):
        g = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape)), TREE)
        updates, state = tx.update(g, state, y)
        y = optax.apply_updates(y, updates)
        x = jax.tree.map(lambda x, g: x - 0.1 * g, x, g)
        plain = corrections.unextrapolated(state, y)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), plain, x)
        last = jax.tree.map(lambda x, g: x - 1.5 * 0.1 * g, x, g)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), y, last)


def test_staleness_divides_by_the_width():
    assert outputs(corrections.scale_by_staleness(4), [8, -4]) == [2, -1]


def test_compensation_carries_a_gradient_of_a_known_curvature_over():
    """With `g * g` for curvature: what the step adds is strength g^2 (w - v) / |g|."""
    tx = corrections.delay_compensation(2, strength=0.5, decay=0.0, eps=1e-20)
    state = tx.init(jnp.float32(1.0))
    # The first gradient was taken where it is applied, the next one update earlier.
    first, state = tx.update(jnp.float32(2.0), state, jnp.float32(1.0))
    assert float(first) == 2.0
    second, state = tx.update(jnp.float32(2.0), state, jnp.float32(4.0))
    assert float(second) == pytest.approx(2.0 + 0.5 * 2.0 * (4.0 - 1.0), rel=1e-5)
    third, state = tx.update(jnp.float32(-3.0), state, jnp.float32(5.0))
    assert float(third) == pytest.approx(-3.0 + 0.5 * 3.0 * (5.0 - 4.0), rel=1e-5)


def test_compensation_without_delay_changes_nothing():
    tx = corrections.delay_compensation(1)
    assert outputs(tx, [1, -5], jnp.float32(2)) == [1, -5]


@pytest.mark.parametrize("name", BY_WIDTH)
def test_state_keeps_its_form_and_a_train_step_takes_it(name):
    tx = BY_WIDTH[name](2)
    state = tx.init(TREE)
    _, after = tx.update(TREE, state, TREE)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert [x.dtype for x in jax.tree.leaves(after)] == [
        x.dtype for x in jax.tree.leaves(state)
    ]
    chained = optax.chain(tx, optax.sgd(0.05))
    train = pj.make_train_step(loss_fn, chained, mesh=pj.data_mesh(2))
    state = train.init(init_params())
    for batch in batches(5):
        state, info = train.step(state, batch)
    assert np.isfinite(info.loss)


@pytest.mark.parametrize("name", BY_WIDTH)
def test_a_loop_may_donate_parameters_and_state(name):
    """No array is in two places."""
    tx = BY_WIDTH[name](3)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state):
        updates, state = tx.update(TREE, state, params)
        return optax.apply_updates(params, updates), state

    params = jax.tree.map(jnp.copy, TREE)
    expected, kept = jax.tree.map(jnp.copy, TREE), tx.init(TREE)
    state = tx.init(params)
    for _ in range(3):
        params, state = step(params, state)
        updates, kept = tx.update(TREE, kept, expected)
        expected = optax.apply_updates(expected, updates)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5), params, expected
    )


@pytest.mark.parametrize("name", BY_WIDTH)
def test_without_delay_nothing_is_corrected(name):
    tx, params = BY_WIDTH[name](1), TREE
    state = tx.init(params)
    for scale in (1.0, -0.3):
        gradient = jax.tree.map(lambda x, s=scale: s * x, TREE)
        updates, state = tx.update(gradient, state, params)
        assert_bits_equal(updates, gradient)
        params = optax.apply_updates(params, updates)


# Of a plain delay, which is what is corrected.
max_learning_rate = functools.partial(
    stability.max_learning_rate, weight_prediction=False
)


def predicted(steps):
    return lambda rate: optax.chain(
        optax.sgd(rate, momentum=0.9), corrections.extrapolate_updates(steps)
    )


def test_prediction_gives_back_part_of_the_stability():
    """From 0.1 at width 2 to 0.27, of 3.8 at width 1."""
    assert max_learning_rate(predicted(0), 2) == pytest.approx(0.1, rel=1e-5)
    assert max_learning_rate(predicted(1), 2) == pytest.approx(0.270, rel=5e-3)


def test_prediction_costs_plain_sgd_stability():
    def family(rate):
        return optax.chain(optax.sgd(rate), corrections.extrapolate_updates(1))

    assert max_learning_rate(family, 2) == pytest.approx(0.618, rel=1e-3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: corrections.average_gradients(0), "`count` must be an integer"),
        (lambda: corrections.extrapolate_updates(-1), "`steps` must be a finite"),
        (lambda: corrections.extrapolate_updates(np.inf), "`steps` must be a finite"),
        (lambda: corrections.scale_by_staleness(0), "`width` must be an integer"),
        (lambda: corrections.delay_compensation(0), "`width` must be an integer"),
        (
            lambda: corrections.delay_compensation(2, strength=-1.0),
            "`strength` must be a finite number of at least 0",
        ),
        (
            lambda: corrections.delay_compensation(2, strength=np.inf),
            "`strength` must be a finite number of at least 0",
        ),
        (
            lambda: corrections.delay_compensation(2, decay=1.0),
            "`decay` must lie in",
        ),
        (lambda: corrections.delay_compensation(2, eps=0.0), "`eps` must be a number"),
        (
            lambda: corrections.unextrapolated(optax.sgd(0.1).init(TREE), TREE),
            "must hold one ExtrapolateUpdatesState, got 0",
        ),
    ],
)
def test_bad_input_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_compensation_asks_for_parameters():
    tx = corrections.delay_compensation(2)
    with pytest.raises(ValueError, match="`params` must be given"):
        tx.update(TREE, tx.init(TREE))


def robust(momentum, width, **options):
    return lambda rate: optax.chain(
        corrections.delay_robust(momentum, width, **options), optax.sgd(rate, momentum)
    )


def test_robust_momentum_is_a_share_of_the_gradient_and_a_slower_average():
    """`u = k g + (h - k) EMA_beta(g)`, h = 1: k = 1/2 of mu = 0.6, w = pi/3 of K=2."""
    gradients = np.random.default_rng(0).normal(size=20)
    slow = 1 - np.pi / 3 / 2 / 8
    average, wanted = 0.0, []
    for gradient in gradients:
        average = slow * average + (1 - slow) * gradient
        wanted.append(-(gradient / 2 + average / 2))
    found = outputs(robust(0.6, 2)(0.4), gradients)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)


def test_robust_momentum_may_stand_on_either_side_of_sgd():
    gradients = np.random.default_rng(0).normal(size=20)
    after = optax.chain(optax.sgd(0.1, 0.9), corrections.delay_robust(0.9, 2))
    before = outputs(robust(0.9, 2)(0.1), gradients)
    np.testing.assert_allclose(outputs(after, gradients), before, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("momentum", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("width", [2, 3, 4])
def test_robust_momentum_is_stable_as_far_as_sgd_at_its_share(width, momentum):
    """But for what is left of the lag at the limit, which takes an eighth of it."""
    at_rate_1 = 2 * np.sin(np.pi / (4 * width - 2))
    of_noise = np.sqrt((1 - momentum) / (1 + momentum))
    of_lag = (1 - momentum) / (1 + momentum)
    for share, given in ((of_noise, {}), (of_lag, {"share": of_lag})):
        limit = max_learning_rate(robust(momentum, width, **given), width)
        sgd = at_rate_1 * (1 - momentum) / share
        assert 0.85 * sgd < limit <= sgd


@pytest.mark.parametrize(("momentum", "more"), [(0.5, 1.2), (0.9, 1.2), (0.99, 1.5)])
def test_robust_momentum_makes_as_much_of_noise_as_heavy_ball(momentum, more):
    """And what its average adds: at K=2 nearly `pi / 48 / share` of the variance."""
    impulse = jnp.zeros(2000).at[0].set(1)

    def response(tx):
        def step(state, gradient):
            update, state = tx.update(gradient, state)
            return state, update

        return jax.lax.scan(step, tx.init(jnp.float32(0)), impulse)[1]

    before, after = (
        float(jnp.linalg.norm(response(tx)))
        for tx in (optax.sgd(0.1, momentum), robust(momentum, 2)(0.1))
    )
    assert before < after < more * before


def test_robust_momentum_takes_a_share_and_a_decay():
    found = outputs(robust(0.5, 2, share=0.25, decay=0.0)(0.5), [1.0, -3.0, 2.0])
    np.testing.assert_allclose(found, [-1.0, 3.0, -2.0], rtol=1e-6)  # averages of one
    found = outputs(robust(0.5, 2, share=0.25, decay=0.5)(0.5), [1.0, 0.0, 0.0])
    np.testing.assert_allclose(found, [-0.625, -0.1875, -0.09375], rtol=1e-6)


def test_robust_momentum_without_momentum_is_no_correction():
    assert outputs(corrections.delay_robust(0.0, 2), [3, -5]) == [3, -5]


@pytest.mark.parametrize("momentum", [-0.1, 1.0, float("nan")])
def test_robust_momentum_wants_a_momentum(momentum):
    with pytest.raises(ValueError, match=r"`momentum` must lie in \[0, 1\)"):
        corrections.delay_robust(momentum, 2)


@pytest.mark.parametrize(
    ("option", "value"),
    [("share", 0.0), ("share", 1.1), ("decay", 1.0), ("decay", float("nan"))],
)
def test_robust_momentum_wants_a_share_and_a_decay_that_exist(option, value):
    with pytest.raises(ValueError, match=f"`{option}` must lie in"):
        corrections.delay_robust(0.9, 2, **{option: value})
