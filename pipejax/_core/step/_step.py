r"""Defines a step as a value: what one device does, as pure functions.

An executor calls three functions in a step of width K:

1. `compute` makes the message of this batch, at the parameters that the device
   predicts.
2. `exchange` sums the messages of K-1 steps ago over devices. If K is above 1, it needs
   nothing of `compute`, so it runs beside it.
3. `apply` applies the mean of the messages that are due.

`train.init` calls `layout` and `init`, which make what the three begin with. All but
`layout` run inside `jax.shard_map` over the axes of the data, on the arrays of one
device or group.

`replicated_step` and `zero1_step` make a `Step`. They differ in what a device keeps of
the optimizer, and in what the exchange does. Where the optimizer is replicated, an
exchange is a sum and nothing else, which the host executor may run on other devices: on
CPUs beside accelerators, or on each shard by itself.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import optax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from pipejax._core.message import Exchange, InFlight, Message, Reduced, Valid
from pipejax._core.prediction import CODE
from pipejax._internal.mesh import AxisName
from pipejax._internal.shards import Shards
from pipejax._internal.types import Keys, Tree
from pipejax.codecs import Codec, Linear
from pipejax.collectives import AllReduce

from ._info import StepInfo
from ._inputs import Inputs
from ._loss import Loss
from ._state import Common, Trainable

Rule = Literal["linearized", "own", False]
Delayed = Callable[[optax.Params], Tree] | Tree | None
"""A pytree of bools of which the parameters have the structure, or its beginning, or a
function from parameters to it. `None` delays all."""


@dataclasses.dataclass(frozen=True, eq=False)
class Settings:
    """The settings of a device's work, named as the arguments of `make_train_step`.

    Attributes:
      axis_name: Mesh axis of the data, or a tuple of axes.
      at_once: The linear codec that chooses what is exchanged at once of every
        gradient, or `None`.
      branches: Whether an update that is not applied is not computed either. This suits
        CPUs. Accelerators select from both results, without waiting for the host.
      device_axis: The axis of the devices of a host, which average their gradients
        before they predict by them, or `None`.
      delayed: The parameters whose gradients are delayed. `None` delays all.
      compute_dtype: dtype of the forward and the backward pass, or `None`.
      local_steps: Whether each group applies its own gradient.
      reduce_dtype: dtype in which gradients travel, or `None`.
      gather_codec: Encodes the differences of parameters that are gathered with a
        sharded optimizer. `None` gathers the parameters themselves.
      explicit: The inner axes of type Explicit, which the loss function sees.
      skip_nonfinite: Whether updates that are not finite are skipped.
      slope_dtype: dtype in which devices gather slopes with a sharded optimizer. It has
        8 bits; tests use more.
    """

    loss_fn: Loss
    tx: optax.GradientTransformation
    axis_name: AxisName
    at_once: Linear | None = None
    branches: bool = True
    explicit: tuple[str, ...] = ()
    microbatches: int = 1
    compute_dtype: DTypeLike | None = None
    delayed: Delayed = None
    device_axis: str | None = None
    gather_codec: Codec | None = None
    local_steps: bool = False
    reduce_dtype: DTypeLike | None = None
    weight_prediction: Rule = "linearized"
    skip_nonfinite: bool = True
    slope_dtype: DTypeLike = CODE

    def axis_within_host(self, width: int) -> str | None:
        """Returns the axis along which a pipeline of this width averages gradients.

        Devices along it have the same message. Without predictions, all differ.
        """
        return self.device_axis if width > 1 and self.weight_prediction else None


class Computed(NamedTuple):
    """The values that `compute` leaves for the update of the same step.

    Attributes:
      counters: Pytree like the model state, with the leaves that advance at once, and
        `None` in place of other leaves.
      at_once: The gradients that are not delayed. The executor exchanges them in the
        same step.
    """

    counters: Tree
    rng: Keys
    step: jax.Array
    at_once: Message | None = None


class Step(NamedTuple):
    """The work of one device or group in a step.

    Attributes:
      layout: `(params, shards, message, mesh) -> Shards` says how the arrays of a state
        are split, from shapes alone. The given shards leave out the optimizer's state.
      init: `(whole, length) -> Trainable` makes what is trained as this device keeps
        it, for queues of `length` messages.
      message: `(params, model_state, rng, inputs, shards)` returns the message of a
        batch, and the leaves of the model state that advance at once.
      compute: `(state, in_flight, inputs) -> Message, Computed`.
      exchange: `(trainable, message, valid, all_reduce) -> Exchange` sums a message
        over devices. With a sharded optimizer, it updates `trainable` on the way.
        Other steps need no `trainable`, which may be `None`.
      gather: `(trainable, all_reduce) -> Trainable` gathers the parameters as they are,
        with nothing in flight. `None` where every device has all of them.
      apply: `(state, computed, reduced, at_once) -> state, StepInfo`, with the reduced
        message that is due and that of gradients that are not delayed. A drain has
        computed nothing, and gives `None` for both.
    """

    settings: Settings
    layout: Callable[[optax.Params, Shards, Message, Mesh], Shards]
    init: Callable[[Trainable, int], Trainable]
    message: Callable[..., tuple[Message, Any]]
    compute: Callable[[Common, InFlight, Inputs], tuple[Message, Computed]]
    exchange: Callable[[Trainable | None, Message, Valid, AllReduce], Exchange]
    gather: Callable[[Trainable, AllReduce], Trainable] | None
    apply: Callable[
        [Common, Computed | None, Reduced, Reduced | None], tuple[Common, StepInfo]
    ]

    @property
    def shards_optimizer(self) -> bool:
        """Returns whether each device keeps only pieces of the optimizer."""
        return self.gather is not None
