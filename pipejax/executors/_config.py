"""The step that an executor runs, as static configuration."""

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
    """The work of one device in a step, before and after the sum over devices."""

    def compute(
        self, state: Any, in_flight: InFlight, batch: Any
    ) -> tuple[Message, Any]:
        """Returns this device's message, and the values that `update` will need."""
        ...

    def update(self, state: Any, kept: Any, reduced: Reduced) -> Any:
        """Returns the state after the sum that is due is applied, and the info."""
        ...

    def deviation(self, in_flight: InFlight, reduced: Reduced) -> Any:
        """Returns the gradients of the oldest message in flight, minus their mean.

        Returns `None` if the step does not feed deviations back.
        """
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class StepConfig:
    """Configuration of a step: the work of each device, and the all-reduce in between.

    Attributes:
      work: The work of each device.
      mesh: The devices.
      axis_name: The mesh axis over which the data is split, or a tuple of such axes.
      width: Pipeline width K, at least 1.
      all_reduce: The algorithm that sums messages over devices.
      donate: Whether a step may overwrite the state that it is given.
    """

    work: DeviceWork
    mesh: Mesh
    axis_name: AxisName
    width: int
    all_reduce: AllReduce
    donate: bool

    @functools.cached_property
    def devices(self) -> int:
        """Returns the number of devices over which the data is split."""
        return math.prod(self.mesh.shape[name] for name in axes(self.axis_name))

    @functools.cached_property
    def sums_by(self) -> AllReduce:
        """Returns the variant of `all_reduce` that suits the mesh best."""
        return self.all_reduce.on(self.mesh)

    @functools.cached_property
    def data(self) -> NamedSharding:
        """Returns the sharding of a batch, which is split over `axis_name`."""
        return NamedSharding(self.mesh, P(self.axis_name))

    def at(self, mesh: Mesh) -> "StepConfig":
        """Returns the same configuration on another mesh.

        Args:
          mesh: The other mesh.
        """
        return dataclasses.replace(self, mesh=mesh)

    def on_mesh(self, local: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
        """Returns `local` as a program that each device runs on its own share.

        Args:
          local: Function of the shares of one device.
          in_specs: Partition specs of the arguments.
          out_specs: Partition specs of the results.
        """
        return on_mesh(local, self.mesh, in_specs, out_specs)

    def codec_states(self, like: Message) -> Any:
        """Returns the states of all devices' codecs before the first message.

        Args:
          like: A device's message, or its shapes.

        Returns:
          The states on the mesh. Every device has its own.
        """

        def local() -> Any:
            return codec_states(like, self.sums_by, self.axis_name)

        init = jax.jit(self.on_mesh(local, (), P(self.axis_name)))
        stateless = not jax.tree.leaves(shapes := jax.eval_shape(init))
        return shapes if stateless else init()
