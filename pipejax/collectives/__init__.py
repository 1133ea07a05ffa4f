"""All-reduce algorithms, which sum gradients over devices.

A function such as `ring(codec)` returns an algorithm, which
`make_train_step(all_reduce=...)` takes. For p devices and a payload of n bytes, the
`wire_bytes` of an algorithm's collectives add up to:

- `psum`: `2 (p-1)/p n`, in one collective per array
- `two_shot`: `2 (p-1)/p n`, in 2 collectives
- `ring`: `2 (p-1)/p n`, in `2 (p-1)` collectives
- `halving_doubling`: `2 (p-1)/p n`, in `2 log2(p)` collectives, for p a power of two
- `tree`: `2 ceil(log2 p) n`, in `2 ceil(log2 p)` collectives
- `parameter_server`: `2 (p-1) n`, in `2 (p-1)` collectives
- `hierarchical`: by default `2 (h-1)/h n/d` between h hosts of d devices each, and
  `2 (d-1)/d n` inside each host

The number of collectives among 8 devices, and the sum of their `wire_bytes`, for 1,000
elements of float32. The axis of `jax.vmap` stands for the devices:

>>> import jax
>>> from pipejax import collectives
>>> def count(name):
...     layout = collectives.Layout.of_shapes(((1000,),))
...     transfers = getattr(collectives, name)()(layout, "data").transfers
...     print(name, len(transfers), sum(x.wire_bytes for x in transfers))
>>> for name in ("ring", "halving_doubling", "tree", "parameter_server"):
...     jax.vmap(lambda: count(name), axis_name="data", axis_size=8)()
ring 14 7000
halving_doubling 6 7000
tree 6 24000
parameter_server 14 56000

`in_rounds` sums the rounds of `power_sgd` with any of these algorithms. `scheduled`
changes from one algorithm to another during a run.

A codec encodes the payloads of all collectives of an algorithm. `None` sends float32 or
float64 vectors as they are. A `codec` that is not a codec raises a `ValueError`, and a
biased codec without error feedback raises a `UserWarning`
(`pipejax.codecs.check_codec`).
"""

from pipejax._internal.wire import Transfer as Transfer
from pipejax._internal.wire import wire_bytes as wire_bytes

from ._all_reduce import AllReduce as AllReduce
from ._grouped import Grouped as Grouped
from ._halving_doubling import halving_doubling as halving_doubling
from ._hierarchical import hierarchical as hierarchical
from ._in_rounds import in_rounds as in_rounds
from ._layout import Layout as Layout
from ._layout import Summands as Summands
from ._no_communication import NoCommunication as NoCommunication
from ._parameter_server import parameter_server as parameter_server
from ._phases import Phase as Phase
from ._phases import phases as phases
from ._psum import psum as psum
from ._reduce_scatter_all_gather import ReduceScatterAllGather as ReduceScatterAllGather
from ._reduce_scatter_all_gather import has_reduce_scatter as has_reduce_scatter
from ._ring import ring as ring
from ._scheduled import Schedule as Schedule
from ._scheduled import scheduled as scheduled
from ._sharded import Sharded as Sharded
from ._sharded import on_own_shards as on_own_shards
from ._sharded import sets_by_axes as sets_by_axes
from ._stages import Local as Local
from ._stages import Sent as Sent
from ._stages import Stages as Stages
from ._stages import local as local
from ._stages import on_first as on_first
from ._stages import run as run
from ._tree import tree as tree
from ._two_shot import two_shot as two_shot
