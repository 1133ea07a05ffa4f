"""How the devices of a group shard the model that they hold together.

A mesh may have more axes than those over which gradients are averaged. The devices at
one place along the data's axes are then a group, which holds one copy of the model. All
other axes are inner axes. Inside a group, XLA splits arrays and compute as in any
program under `jax.jit`, and adds the collectives for it.

A step runs inside `jax.shard_map` over the data's axes alone, where arrays have the
shapes that they have in a group. The partition specs of this package name inner axes
only.
"""

from ._in_group import as_on_shards as as_on_shards
from ._in_group import constrained as constrained
from ._in_group import group_axes as group_axes
from ._in_group import on_shards as on_shards
from ._in_group import over_own_axes as over_own_axes
from ._inner_specs import inner_specs as inner_specs
from ._specs import UNSHARDED as UNSHARDED
from ._specs import Shards as Shards
from ._specs import combined_spec as combined_spec
from ._specs import copies_of as copies_of
from ._specs import data_axes_of as data_axes_of
from ._specs import data_spec as data_spec
from ._specs import of_all_groups as of_all_groups
from ._specs import optimizer_specs as optimizer_specs
from ._specs import over as over
from ._specs import shard_form as shard_form
from ._specs import split_axes as split_axes
