"""Measures how a delay changes learning, and which methods correct this."""

from ._contenders import OPTIMIZERS as OPTIMIZERS
from ._contenders import Method as Method
from ._train import train as train
