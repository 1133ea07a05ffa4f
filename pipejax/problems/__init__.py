"""Convex objectives with a known optimum, curvature and gradient bound."""

from ._linear_models import absolute as absolute
from ._linear_models import hinge as hinge
from ._linear_models import least_squares as least_squares
from ._linear_models import logistic as logistic
from ._linear_models import softmax as softmax
from ._problem import Problem as Problem
from ._quadratic import quadratic as quadratic
