"""Ways to train one problem on several hosts, ours and others', behind one face.

D-Sync and Pipe-SGD with any codec, PS-Sync, PS-Async over sockets, PyTorch's DDP with
its hooks: one model, from the same parameters, on the same batches, with AdamW.
"""

from ._method import Method as Method
from ._named import NAMES as NAMES
from ._named import NotInstalledError as NotInstalledError
from ._named import make as make
from ._pipejax import Pipejax as Pipejax
from ._problem import Problem as Problem
