"""Tests that every problem's optimum is one, and that its constants are bounds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pipejax as pj
from pipejax import problems

from .helpers import features, in_float64, labels, signs, targets

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
    """Yields random points at this distance from the optimum."""
    rng = np.random.default_rng(3)
    for _ in range(count):
        away = rng.normal(size=problem.optimum.shape)
        yield problem.optimum + radius * away / np.linalg.norm(away)


def test_no_point_nearby_is_lower_than_the_optimum(problem):
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
        hessian = jax.jit(jax.hessian(problem.loss_fn))
        h = in_float64(hessian, problem.optimum, problem.examples)
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


def test_train_steps_approach_the_optimum(problem):
    """Steps on whole batches approach the optimum, in the pipeline too."""
    bound = problem.smoothness if np.isfinite(problem.smoothness) else 100.0
    train = pj.make_train_step(
        problem.loss_fn, optax.sgd(0.2 / bound), mesh=pj.data_mesh(2)
    )
    start = np.zeros(problem.optimum.shape, np.float32)
    state, batch = train.init(start), problem.batch(np.arange(problem.size))
    for _ in range(20):
        state, _ = train.step(state, batch)
    assert problem.excess(np.asarray(state.params)) < problem.excess(start)
