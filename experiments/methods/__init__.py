"""Ways to train one problem on several hosts, behind one interface.

They are D-Sync and Pipe-SGD with any codec, PS-Sync, PS-Async over sockets, and
PyTorch's DDP with its hooks. All train one model by AdamW, from the same parameters and
on the same batches.
"""

from ._local import Local as Local
from ._method import Batch as Batch
from ._method import Method as Method
from ._named import NAMES as NAMES
from ._named import NotInstalledError as NotInstalledError
from ._named import fed_back as fed_back
from ._named import make as make
from ._pipejax import Pipejax as Pipejax
from ._problem import Problem as Problem
from ._text_problem import TextProblem as TextProblem
