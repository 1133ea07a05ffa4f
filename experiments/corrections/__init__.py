"""Corrections for a delay that `experiments.convergence` compares with pipejax's own.

They correct less than weight prediction and `pj.transforms` do, and are therefore not
part of the library. Like `pj.transforms`, they are made for a plain delay.
"""

from ._average import average_gradients as average_gradients
from ._compensate import delay_compensation as delay_compensation
