"""Flax's Gemma in one group, whose devices split the batch and the matrices."""

import functools

from . import _gemma

FOLDER, CONVERSION = _gemma.FOLDER, _gemma.CONVERSION
program = functools.partial(_gemma.program, groups=(1, 2, 2))
