"""The step that an executor runs, as static configuration."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pipejax._core.message import (
    Exchange,
    InFlight,
    Mark,
    Message,
    Valid,
    mark_of,
    marked,
)
from pipejax._core.step import (
    Common,
    Computed,
    Inputs,
    InputSpecs,
    Step,
    Trainable,
    empty_message,
    moving,
    parted,
    state_data_specs,
)
from pipejax._internal.mesh import (
    AxisName,
    axes,
    inner_axes,
    on_mesh,
    on_mesh_by,
    size_along,
)
from pipejax._internal.shards import Shards
from pipejax._internal.types import ModelState, Specs, Tree
from pipejax.collectives import AllReduce, NoCommunication, psum


@dataclasses.dataclass(frozen=True, eq=False)
class StepConfig:
    """Configuration of a step: the work of each device, and the all-reduce in between.

    Attributes:
      mesh: The devices. If the mesh has more axes than those of the data, each group of
        devices shards a copy of the model over them.
      width: Pipeline width K, at least 1.
      donate: Whether a step may overwrite the state that it is given.
    """

    step: Step
    mesh: Mesh
    width: int
    all_reduce: AllReduce
    donate: bool

    @property
    def axis_name(self) -> AxisName:
        """Returns the mesh axis over which the data is split, or a tuple of axes."""
        return self.step.settings.axis_name

    @functools.cached_property
    def devices(self) -> int:
        """Returns the number of devices, or groups, over which the data is split."""
        return size_along(self.mesh, self.axis_name)

    @functools.cached_property
    def message_axes(self) -> tuple[str, ...]:
        """Returns the axes of the data along which devices hold different messages."""
        same = self.step.settings.axis_within_host(self.width)
        return tuple(name for name in axes(self.axis_name) if name != same)

    @property
    def message_spec(self) -> P:
        """Returns how the messages of all devices or groups are split."""
        return P(self.message_axes)

    @property
    def queue_specs(self) -> InFlight:
        """Returns how everything in flight is split over the axes of the data."""
        own: Any = P(self.axis_name)
        message: Any = self.message_spec
        return InFlight((message,) * (self.width - 1), own, own)

    @functools.cached_property
    def messages(self) -> int:
        """Returns the number of messages of a step: of devices, hosts or groups."""
        return size_along(self.mesh, self.message_axes)

    @functools.cached_property
    def sums_by(self) -> AllReduce:
        """Returns the variant of `all_reduce` that suits the mesh best."""
        return self.all_reduce.on(self.mesh)

    @functools.cached_property
    def at_once(self) -> "StepConfig":
        """Returns the configuration whose all-reduce sums what is not delayed."""
        codec = self.step.settings.at_once
        if codec is None or isinstance(self.all_reduce, NoCommunication):
            return self
        # `psum(codec)` would warn of what the codec loses, which is sent later.
        all_reduce = dataclasses.replace(psum(), codec=codec)
        return dataclasses.replace(self, all_reduce=all_reduce)

    @functools.cached_property
    def data(self) -> NamedSharding:
        """Returns the sharding of a batch, which is split over `axis_name`."""
        return NamedSharding(self.mesh, P(self.axis_name))

    @property
    def inputs(self) -> Inputs | None:
        """Returns the shardings that a program gives its inputs, if it gives any."""
        inner = inner_axes(self.mesh, self.axis_name)
        return None if inner else Inputs(self.data, None, InputSpecs())

    def empty_messages(
        self, params: optax.Params, model_state: ModelState, shards: Shards
    ) -> tuple[Message, Message | None]:
        """Returns the shapes of `empty_message`, for one device or group.

        The first part is delayed, and the second is exchanged at once, if any is.
        """
        settings = self.step.settings

        def make() -> tuple[Message, Message | None]:
            whole = empty_message(settings, params, model_state, shards)
            return parted(settings, params, whole)

        return jax.eval_shape(self.on_mesh(make, (), P()))

    def exchange(
        self, trained: Trainable | None, message: Message, valid: Valid, mark: Mark
    ) -> Exchange:
        """Returns the exchange of a message, which compares `mark` if there is one."""

        def of(message: Message) -> Exchange:
            return self.step.exchange(trained, message, valid, self.sums_by)

        return marked(of, message, mark, self.axis_name)

    def mark(self, batch: Tree) -> Mark:
        """Returns the mark of a call, or `None` if all devices are of one process."""
        silent = isinstance(self.all_reduce, NoCommunication)
        return mark_of(batch) if self.mesh.is_multi_process and not silent else None

    def result(self, state: Common, computed: Computed | None, changes: Tree) -> Common:
        """Returns what a program returns of a state after an update by `changes`."""
        # An array that the program may overwrite is returned without a copy. It would
        # be deleted if it were not returned.
        return state if self.donate else moving(state, computed, changes)

    def at(self, mesh: Mesh) -> "StepConfig":
        """Returns the same configuration on another mesh."""
        return dataclasses.replace(self, mesh=mesh)

    def on_mesh(
        self, local: Callable[..., Any], in_specs: Specs, out_specs: Specs
    ) -> Any:
        """Returns `local` as a program that each device or group runs on its share."""
        return on_mesh(local, self.mesh, in_specs, out_specs, self.axis_name)

    def on_state(
        self,
        local: Callable[..., Any],
        rest: Specs,
        queue: Specs,
        *reports: Specs,
    ) -> Any:
        """Returns `local` as a program of what is common and more arguments.

        Its results are the next `Common`, the next queue or a part of it, infos, and
        perhaps more. `rest` are the partition specs of the other arguments, `queue`
        those of the second result, and `reports` those of the results after infos.
        """

        def specs(state: Common, *_: Any) -> tuple[Any, Any]:
            own = state_data_specs(state, self.axis_name)
            # The next state may have no leaf in place of one that does not move.
            after = own._replace(model_state=P())
            return (own, *rest), (after, queue, P(), *reports)

        def like(state: Common, *_: Any) -> tuple[Any, ...]:
            return state, None, state.step, *(None for _ in reports)

        return on_mesh_by(specs, local, self.mesh, self.axis_name, like)
