"""What an executor is given, and what it gives back."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Protocol

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pipejax.buckets import Buckets
from pipejax.collectives import AllReduce, Stages
from pipejax.mesh import AxisName, axes, on_mesh
from pipejax.message import MessageForm
from pipejax.pipeline import PipelinedMeanState


class Halves(Protocol):
    """One device's part of a step, before and after the sum over devices."""

    def compute(
        self, carry: Any, in_flight: PipelinedMeanState, batch: Any
    ) -> tuple[Buckets, Any]:
        """This device's buckets, and what `update` will need."""
        ...

    def update(self, carry: Any, kept: Any, total: Any, arrived: Any) -> Any:
        """The carry with the sum that is due applied, and what to report."""
        ...

    def deviation(
        self, in_flight: PipelinedMeanState, total: Buckets, applied: Any
    ) -> Buckets:
        """What the oldest in flight differs from its mean by, for what comes next."""
        ...

    def idle(self, carry: Any) -> Any:
        """What `update` needs where no batch was computed."""
        ...

    def check_state(self, carry: Any, in_flight: PipelinedMeanState) -> None:
        """A ValueError unless the pipeline is one for these parameters."""
        ...

    def check_message(self, kept: Any, in_flight: PipelinedMeanState) -> None:
        """A ValueError unless what was computed has its place in the pipeline."""
        ...

    def message_form(self, carry: Any, lengths: dict[str, int]) -> MessageForm:
        """What buckets of these lengths hold."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class Setting:
    """A step to be run: its halves, and the all-reduce between them.

    Attributes:
      halves: what each device does.
      mesh: where.
      axis_name: the mesh axis of the data, or two of them.
      width: of the pipeline.
      all_reduce: how gradients are summed.
      donate: whether a step may overwrite the carry it is given.
    """

    halves: Halves
    mesh: Mesh
    axis_name: AxisName
    width: int
    all_reduce: AllReduce
    donate: bool

    @functools.cached_property
    def devices(self) -> int:
        """How many share the data."""
        return math.prod(self.mesh.shape[name] for name in axes(self.axis_name))

    @functools.cached_property
    def data(self) -> NamedSharding:
        """Where a batch lies: one share a device."""
        return NamedSharding(self.mesh, P(self.axis_name))

    def form(self, carry: Any, buckets: Buckets) -> MessageForm:
        """What these buckets of one device hold."""
        lengths = {name: x.size for name, x in buckets.items()}
        return self.halves.message_form(carry, lengths)

    def reductions(self, form: MessageForm) -> dict[str, Stages]:
        """The stages that sum each bucket."""
        return form.reductions(self.all_reduce, self.axis_name)

    def at(self, mesh: Mesh) -> "Setting":
        """The same on another mesh."""
        return dataclasses.replace(self, mesh=mesh)

    def on_mesh(self, local: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
        """`local`, run by each device of the mesh on its own share."""
        return on_mesh(local, self.mesh, in_specs, out_specs)

    def codec_states(self, form: MessageForm) -> Any:
        """The codecs' states before the first message, each device's own."""

        def local() -> Any:
            return {name: x.init() for name, x in self.reductions(form).items()}

        init = jax.jit(self.on_mesh(local, (), P(self.axis_name)))
        stateless = not jax.tree.leaves(shapes := jax.eval_shape(init))
        return shapes if stateless else init()


class Executor(Protocol):
    """Runs a step: `carry` is replicated and may be donated, `in_flight` never is.

    Attributes:
      name: as `make_train_step` takes it.
      reason: why it is this one.
    """

    name: str
    reason: str

    @property
    def compiler_options(self) -> dict[str, Any]:
        """What its programs are compiled with."""
        ...

    @property
    def reduction_mesh(self) -> Mesh:
        """Where it sums; there lies what codecs keep."""
        ...

    def step(self, carry: Any, in_flight: Any, batch: Any) -> tuple[Any, Any, Any]:
        """One step on: the carry, what is in flight, and what to report."""
        ...

    def drain(self, carry: Any, in_flight: Any) -> tuple[Any, Any]:
        """Everything in flight applied, in order."""
        ...

    def lower(self, carry: Any, in_flight: Any, batch: Any) -> jax.stages.Lowered:
        """The program in which a step computes."""
        ...

    def join(self) -> None:
        """Waits until it has no collective under way, that others may launch theirs."""
        ...
