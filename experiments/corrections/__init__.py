"""Corrections for a delay that `experiments.convergence` compares with pipejax's own.

They correct less than weight prediction, `pj.transforms.delay_robust` and
`pj.transforms.extrapolate_updates`, and are therefore not part of the library. They are
made for a plain delay.
"""

from ._average import average_gradients as average_gradients
from ._compensate import delay_compensation as delay_compensation
