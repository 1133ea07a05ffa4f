"""How gradients are summed over devices."""

from ._psum import psum as psum
from ._stages import AllReduce as AllReduce
from ._stages import Stages as Stages
from ._stages import run as run
from ._two_shot import two_shot as two_shot
