"""Measures how a delay changes learning, and which methods correct this."""

from ._change import differences as differences
from ._change import diverged as diverged
from ._change import spread as spread
from ._contenders import OPTIMIZERS as OPTIMIZERS
from ._contenders import Method as Method
from ._runs import Run as Run
from ._runs import found as found
from ._runs import tuned_rate as tuned_rate
from ._tasks import make_task as make_task
from ._train import finite as finite
from ._train import train as train
