"""How gradients are summed over devices."""

from ._all_reduce import AllReduce as AllReduce
from ._halving_doubling import halving_doubling as halving_doubling
from ._hierarchical import hierarchical as hierarchical
from ._layout import Layout as Layout
from ._layout import Summands as Summands
from ._parameter_server import parameter_server as parameter_server
from ._psum import psum as psum
from ._ring import ring as ring
from ._scheduled import Schedule as Schedule
from ._scheduled import scheduled as scheduled
from ._stages import Stages as Stages
from ._stages import run as run
from ._tree import tree as tree
from ._two_shot import two_shot as two_shot
from ._wire import Transfer as Transfer
