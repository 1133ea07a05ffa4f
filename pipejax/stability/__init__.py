"""Exact limits on the learning rate of a pipelined optimizer, on a quadratic loss."""

from ._limit import max_curvature as max_curvature
from ._limit import max_learning_rate as max_learning_rate
from ._limit import spectral_radius as spectral_radius
from ._sharpness import sharpness as sharpness
