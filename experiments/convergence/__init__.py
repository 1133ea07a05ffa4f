"""How a delay changes what is learned, and what corrects it."""

from ._contenders import OPTIMIZERS as OPTIMIZERS
from ._contenders import Method as Method
from ._train import train as train
