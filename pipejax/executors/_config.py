"""What an executor runs."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Protocol

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pipejax.collectives import AllReduce
from pipejax.mesh import AxisName, axes, on_mesh
from pipejax.message import InFlight, Message, Reduced, codec_states


class DeviceWork(Protocol):
    """What each device does in a step, before and after the sum over devices."""

    def compute(
        self, state: Any, in_flight: InFlight, batch: Any
    ) -> tuple[Message, Any]:
        """Returns this device's message, and what `update` will need."""
        ...

    def update(self, state: Any, kept: Any, reduced: Reduced) -> Any:
        """Returns the state with the sum that is due applied, and what to report."""
        ...

    def deviation(self, in_flight: InFlight, reduced: Reduced) -> Any:
        """Returns what the oldest message in flight differs from its mean by."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class StepConfig:
    """A step to be run: what each device does, and the all-reduce in between.

    Attributes:
      work: what each device does.
      mesh: the devices.
      axis_name: the mesh axis of the data, or two of them.
      width: pipeline width K.
      all_reduce: how gradients are summed.
      donate: whether a step may overwrite the state it is given.
    """

    work: DeviceWork
    mesh: Mesh
    axis_name: AxisName
    width: int
    all_reduce: AllReduce
    donate: bool

    @functools.cached_property
    def devices(self) -> int:
        """How many devices share the data."""
        return math.prod(self.mesh.shape[name] for name in axes(self.axis_name))

    @functools.cached_property
    def sums_by(self) -> AllReduce:
        """The all-reduce, as it is best on this mesh."""
        return self.all_reduce.on(self.mesh)

    @functools.cached_property
    def data(self) -> NamedSharding:
        """How a batch lies on the mesh: one share on each device."""
        return NamedSharding(self.mesh, P(self.axis_name))

    def at(self, mesh: Mesh) -> "StepConfig":
        """Returns the same configuration on another mesh."""
        return dataclasses.replace(self, mesh=mesh)

    def on_mesh(self, local: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
        """Returns `local` as a program that each device runs on its own share."""
        return on_mesh(local, self.mesh, in_specs, out_specs)

    def codec_states(self, like: Message) -> Any:
        """Returns what the codecs keep before the first message; each device's own.

        Args:
          like: a device's message, or its shapes.
        """

        def local() -> Any:
            return codec_states(like, self.sums_by, self.axis_name)

        init = jax.jit(self.on_mesh(local, (), P(self.axis_name)))
        stateless = not jax.tree.leaves(shapes := jax.eval_shape(init))
        return shapes if stateless else init()
