"""How large a learning rate a delay allows, exactly, on a quadratic."""

from ._limit import max_curvature as max_curvature
from ._limit import max_learning_rate as max_learning_rate
from ._limit import spectral_radius as spectral_radius
from ._picture import picture as picture
from ._sharpness import sharpness as sharpness
