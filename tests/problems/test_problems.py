"""Problems: the optimum is one, and no constant is exceeded."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pipejax as pj
from pipejax import problems

N, D = 60, 4


def features(seed=0):
    return np.random.default_rng(seed).normal(size=(N, D))


def targets(seed=1):
    rng = np.random.default_rng(seed)
    return features() @ rng.normal(size=D) + rng.normal(size=N)


def signs():
    return np.where(targets() > 0, 1, -1)


def labels():
    return np.random.default_rng(2).integers(0, 3, N)


PROBLEMS = {
    "quadratic": lambda: problems.quadratic([0.5, 1.0, 4.0], noise=0.3),
    "flat quadratic": lambda: problems.quadratic([0.0, 1.0]),
    "least squares": lambda: problems.least_squares(features(), targets()),
    "ridge": lambda: problems.least_squares(features(), targets(), l2=0.5),
    "absolute": lambda: problems.absolute(features(), targets()),
    "hinge": lambda: problems.hinge(features(), signs()),
    "logistic": lambda: problems.logistic(features(), signs()),
    "logistic with L2": lambda: problems.logistic(features(), signs(), l2=0.1),
    "softmax": lambda: problems.softmax(features(), labels(), l2=0.01),
}
SMOOTH = [name for name in PROBLEMS if name not in ("absolute", "hinge")]


@functools.cache
def made(name):
    return PROBLEMS[name]()


@pytest.fixture(params=PROBLEMS)
def problem(request):
    return made(request.param)


@pytest.fixture(params=SMOOTH)
def smooth(request):
    return made(request.param)


def nearby(problem, radius, count=20):
    """Points at this distance from the optimum."""
    rng = np.random.default_rng(3)
    for _ in range(count):
        away = rng.normal(size=problem.optimum.shape)
        yield problem.optimum + radius * away / np.linalg.norm(away)


def in_float64(function, *args):
    with jax.enable_x64(True):
        return np.asarray(function(*jax.tree.map(jnp.asarray, args)))


def test_nothing_is_lower_than_the_optimum(problem):
    for radius in (1e-6, 1e-3, 1.0, 10.0):
        for w in nearby(problem, radius):
            assert problem.excess(w) >= -1e-14


def test_gradient_vanishes_at_a_smooth_optimum(smooth):
    gradient = jax.jit(jax.grad(smooth.loss_fn))
    at_optimum = in_float64(gradient, smooth.optimum, smooth.examples)
    assert np.linalg.norm(at_optimum) < 1e-10


def test_curvature_is_between_its_bounds(smooth):
    hessian = jax.jit(jax.hessian(smooth.loss_fn))
    size = smooth.optimum.size
    for w in (smooth.optimum, *nearby(smooth, 1.0, 5)):
        h = in_float64(hessian, w, smooth.examples).reshape(size, size)
        eigenvalues = np.linalg.eigvalsh(h)
        assert eigenvalues[0] >= smooth.strong_convexity - 1e-9
        assert eigenvalues[-1] <= smooth.smoothness + 1e-9


def test_curvature_of_squares_reaches_its_bounds():
    for name in ("quadratic", "least squares", "ridge"):
        problem = PROBLEMS[name]()
        h = in_float64(jax.hessian(problem.loss_fn), problem.optimum, problem.examples)
        eigenvalues = np.linalg.eigvalsh(h)
        assert eigenvalues[0] == pytest.approx(problem.strong_convexity)
        assert eigenvalues[-1] == pytest.approx(problem.smoothness)


def test_no_example_has_a_steeper_gradient(problem):
    @jax.jit
    def each(w, examples):
        def of_one(example):
            one = jax.tree.map(lambda x: x[None], example)
            return jnp.linalg.norm(jax.grad(problem.loss_fn)(w, one))

        return jax.vmap(of_one)(examples)

    for radius in (0.0, 1.0, 10.0):
        bound = problem.lipschitz(radius)
        for w in nearby(problem, radius, 5):
            assert in_float64(each, w, problem.examples).max() <= bound * (1 + 1e-9)


def test_optimum_of_least_squares_is_lapacks():
    expected = np.linalg.lstsq(features(), targets(), rcond=None)[0]
    np.testing.assert_allclose(
        PROBLEMS["least squares"]().optimum, expected, rtol=1e-10
    )


def test_optimum_of_the_absolute_loss_of_a_constant_is_the_median():
    y = np.array([3.0, -1.0, 10.0, 2.0, 2.5])
    assert problems.absolute(np.ones((5, 1)), y).optimum[0] == pytest.approx(2.5)


def test_unsigned_targets_are_numbers_like_others():
    y = np.abs(40 * targets()).astype(np.uint8)
    found, expected = (
        problems.absolute(features(), kind) for kind in (y, y.astype(float))
    )
    np.testing.assert_array_equal(found.optimum, expected.optimum)


def test_optimum_does_not_depend_on_the_scale_of_features():
    scaled = problems.logistic(1e6 * features(), signs()).optimum
    expected = PROBLEMS["logistic"]().optimum
    np.testing.assert_allclose(1e6 * scaled, expected, rtol=1e-9)


def test_optimum_of_logistic_regression_on_a_constant_is_the_log_odds():
    y = np.array([1] * 3 + [-1])
    problem = problems.logistic(np.ones((4, 1)), y)
    assert problem.optimum[0] == pytest.approx(np.log(3), rel=1e-10)


def test_a_train_step_takes_it(problem):
    """Whole batches at a small step come nearer, pipelined too."""
    bound = problem.smoothness if np.isfinite(problem.smoothness) else 100.0
    train = pj.make_train_step(
        problem.loss_fn, optax.sgd(0.2 / bound), mesh=pj.data_mesh(2)
    )
    start = np.zeros(problem.optimum.shape, np.float32)
    state, batch = train.init(start), problem.batch(np.arange(problem.size))
    for _ in range(20):
        state, _ = train.step(state, batch)
    assert problem.excess(np.asarray(state.params)) < problem.excess(start)


def test_batch_is_of_the_examples_asked_for():
    x, y = PROBLEMS["softmax"]().batch(np.array([3, 1]))
    np.testing.assert_allclose(x, features()[[3, 1]], rtol=1e-6)
    assert x.dtype == np.float32
    np.testing.assert_array_equal(y, labels()[[3, 1]])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: problems.quadratic([]), "`spectrum` must be a vector of finite"),
        (lambda: problems.quadratic([-1.0]), "`spectrum` must be a vector"),
        (lambda: problems.quadratic([np.inf]), "`spectrum` must be a vector"),
        (lambda: problems.quadratic([1.0], noise=-1.0), "`noise` must be a finite"),
        (lambda: problems.quadratic([1.0], noise=np.inf), "`noise` must be a finite"),
        (lambda: problems.quadratic([1.0], size=1), "`size` must be an integer"),
        (lambda: problems.quadratic([1.0], size=2.5), "`size` must be an integer"),
        (lambda: problems.absolute(features(), targets()[1:]), r"shape \[n, d\]"),
        (lambda: problems.absolute(features() * np.nan, targets()), "must be finite"),
        (
            lambda: problems.least_squares(np.ones((N, 2)), targets()),
            "must have independent features",
        ),
        (
            lambda: problems.least_squares(features(), targets(), l2=-1.0),
            "`l2` must be a finite number of at least 0",
        ),
        (lambda: problems.hinge(features(), labels()), "labels -1 and 1"),
        (
            lambda: problems.logistic(features(), np.sign(features()[:, 0])),
            "`l2` must be above 0 where a plane separates",
        ),
        (
            lambda: problems.logistic(features() * [1, 1e3, 1, 1e-3], signs()),
            "must have an optimum that Newton's method finds.* scale the features",
        ),
        (lambda: problems.absolute(1e200 * features(), targets()), "Scale the feat"),
        (
            lambda: problems.least_squares(features(), targets(), l2=np.inf),
            "`l2` must be a finite number",
        ),
        (lambda: problems.softmax(features(), labels(), l2=0), "`l2` must be above 0"),
        (
            lambda: problems.softmax(features(), targets(), l2=0.1),
            "`y` must be integer labels from 0",
        ),
    ],
)
def test_bad_input_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
