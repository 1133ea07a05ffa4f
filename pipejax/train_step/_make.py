"""`make_train_step`: a loss, an optimizer and a mesh, made into Pipe-SGD.

One step of width K, in full:

1. every device computes its message: gradient, loss, metrics, change of model state
2. `pipelined_mean` trades it for the mean message of K-1 steps ago
3. the update applies that, unless it has not arrived or is not finite

Warm-up is the same step with width 1, which leaves the pipeline empty; draining is
step 3 for each message still in flight.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from pipejax import buckets
from pipejax.mesh import with_auto_axes

from ._check import (
    check_batch,
    check_count,
    check_floating,
    check_in_flight,
    check_mesh,
    check_params,
    check_room,
    check_step_known,
    check_tx,
    check_width,
)
from ._gradient import Loss, empty_message, local_message
from ._pipelined_mean import PipelinedMeanState, in_flight_means, pipelined_mean
from ._state import Message, PipelineState, StepInfo, pipeline_specs
from ._update import apply_message


def make_train_step(
    loss_fn: Loss,
    tx: optax.GradientTransformation,
    *,
    mesh: Mesh,
    width: int = 2,
    warmup_steps: int = 0,
    microbatches: int = 1,
    compute_dtype: DTypeLike | None = None,
    reduce_dtype: DTypeLike | None = None,
    axis_name: str = "data",
    donate: bool = False,
) -> "TrainStep":
    """Makes a data-parallel train step of pipeline width K.

    With `w` the parameters, `u` the update of `tx`, `g` the mean gradient over devices:

      `w[t] = w[t-1] - u(g[t-K])`,  `g[t] = 1/p sum_i grad f_i(w[t])`

    `width=1` is synchronous data-parallel SGD. At `width=2` the all-reduce of one
    step's gradients runs while the next step computes; wider pipelines only absorb
    jitter.

    Args:
      loss_fn: `loss_fn(params, batch) -> scalar`, a mean over the examples it is given.
        In full `loss_fn(params, batch, *, model_state, rng) -> (scalar, pj.Aux(...))`:
        it is passed the keywords that `init` was given, and returns what it has.
      tx: any Optax transformation. It sees the reduced gradient, so clipping by global
        norm inside it is clipping by the true norm.
      mesh: devices, such as `pj.data_mesh()`.
      width: pipeline width K, at least 1.
      warmup_steps: first so many steps run with width 1.
      microbatches: parts, run in turn, of each device's share of a batch.
      compute_dtype: floating parameters and inputs are cast to it inside the loss;
        parameters, optimizer state and gradients keep the parameters' dtype.
      reduce_dtype: dtype in which gradients, and all that travels with them, are sent
        and summed; `None` keeps the gradients' own.
      axis_name: the mesh axis of the data.
      donate: let a step overwrite the memory of the state it is given (not of the
        gradients in flight, which may still be being sent). That state is then gone.

    Returns:
      A `TrainStep`: `init`, `step` and `drain`.

    Raises:
      ValueError: for an argument that breaks a rule named in the message.

    >>> import jax.numpy as jnp, optax, pipejax as pj
    >>> def loss_fn(w, batch):
    ...     return 0.5 * jnp.mean((w - batch) ** 2)
    >>> train = pj.make_train_step(loss_fn, optax.sgd(0.1), mesh=pj.data_mesh(1))
    >>> state = train.init(jnp.array(1.0))
    >>> for _ in range(3):
    ...     state, info = train.step(state, jnp.zeros(4))
    >>> print(f"{state.params:.2f}")  # 1, 1 - 0.1, then 0.9 - 0.1 * grad(1.0)
    0.80
    """
    return TrainStep(
        loss_fn=loss_fn,
        tx=optax.with_extra_args_support(check_tx(tx)),
        mesh=with_auto_axes(check_mesh(mesh, axis_name)),
        width=check_width(width),
        warmup_steps=check_count("warmup_steps", warmup_steps, 0),
        microbatches=check_count("microbatches", microbatches, 1),
        compute_dtype=check_floating("compute_dtype", compute_dtype),
        reduce_dtype=check_floating("reduce_dtype", reduce_dtype),
        axis_name=axis_name,
        donate=donate,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class TrainStep:
    """A train step and its settings, as `make_train_step` returns it.

    Pure: everything that changes is in the `PipelineState` that goes in and comes out.
    """

    loss_fn: Loss
    tx: optax.GradientTransformationExtraArgs
    mesh: Mesh
    width: int
    warmup_steps: int
    microbatches: int
    compute_dtype: DTypeLike | None
    reduce_dtype: DTypeLike | None
    axis_name: str
    donate: bool

    def init(
        self,
        params: optax.Params,
        *,
        model_state: Any = None,
        rng: jax.Array | None = None,
        opt_state: optax.OptState | None = None,
        batch: Any = None,
    ) -> PipelineState:
        """The state before the first step, laid out on the mesh.

        Args:
          params: pytree of floating arrays.
          model_state: handed to `loss_fn` as a keyword, and updated by what it returns.
            Floating leaves are averaged over devices; others must not depend on data.
          rng: key; `loss_fn` gets one of its own per device and step as a keyword.
          opt_state: to go on from an optimizer's state; `None` makes a new one.
          batch: one batch, arrays or `jax.ShapeDtypeStruct`s. Needed only when
            `loss_fn` returns metrics and `width > 1`, to know what travels with the
            gradients.

        Returns:
          A `PipelineState`; copies, `params` themselves are never donated.

        Raises:
          ValueError: if a parameter is not floating, or the batch does not divide.
        """
        check_params(params)
        replicated = NamedSharding(self.mesh, P())
        args = jax.device_put((params, model_state, rng, opt_state), replicated)
        message = self._message_shape(params, model_state, rng, batch)

        def make(params: Any, model_state: Any, rng: Any, opt_state: Any) -> Any:
            return PipelineState(
                params=params,
                opt_state=self.tx.init(params) if opt_state is None else opt_state,
                model_state=model_state,
                in_flight=self._pipeline.init(message),
                rng=rng,
                skipped=jnp.zeros((), jnp.int32),
                step=None,
            )

        specs = pipeline_specs(self.axis_name)
        state: PipelineState = jax.jit(self._on_mesh(make, P(), specs))(*args)
        return state._replace(step=np.int32(0))

    def step(self, state: PipelineState, batch: Any) -> tuple[PipelineState, StepInfo]:
        """One iteration: computes this batch's gradient, applies an earlier one.

        Args:
          state: from `init` or the step before.
          batch: pytree of arrays whose leading axis is the global batch, a multiple of
            devices times microbatches. Device i takes the i-th contiguous share.

        Returns:
          The next state, and a `StepInfo` on the iteration whose gradient arrived.

        Raises:
          ValueError: for a batch that does not divide, a state of another width or
            mesh, or a loss function that breaks its contract.
        """
        if self.width > 1 and self._warming_up(state):
            # The pipeline stays empty while the synchronous twin goes past it.
            after, info = self.plain.step(
                state._replace(in_flight=pipelined_mean(self.axis_name, 1).init(())),
                batch,
            )
            return after._replace(in_flight=state.in_flight), info
        check_batch(batch, self.mesh.shape[self.axis_name], self.microbatches)
        batch = jax.device_put(batch, NamedSharding(self.mesh, P(self.axis_name)))
        after, info = self._programs[0](*_split(state), batch)
        return after._replace(step=state.step + np.int32(1)), info

    def drain(self, state: PipelineState) -> PipelineState:
        """Reduces and applies, in order, every gradient in flight.

        A run of n steps and a drain has applied all n gradients. Stepping on is
        allowed: the pipeline then fills anew, its first `width - 1` steps applying
        nothing.

        Args:
          state: from `init`, `step` or `drain`.

        Returns:
          The state with nothing in flight.

        Raises:
          ValueError: for a state of another width or mesh.
        """
        return self._programs[1](*_split(state))._replace(step=state.step)

    @functools.cached_property
    def plain(self) -> "TrainStep":
        """The synchronous twin: the same step at width 1."""
        return dataclasses.replace(self, width=1, warmup_steps=0)

    @functools.cached_property
    def _pipeline(self) -> optax.GradientTransformation:
        return pipelined_mean(
            self.axis_name, self.width, reduce_dtype=self.reduce_dtype
        )

    @functools.cached_property
    def _programs(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """The step and the drain, each compiled once in a run."""
        specs, data = pipeline_specs(self.axis_name), P(self.axis_name)

        def program(local: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
            mapped = self._on_mesh(local, in_specs, out_specs)

            def checked(state: PipelineState, in_flight: Any, *batch: Any) -> Any:
                check_in_flight(in_flight, self.width, self.mesh.shape[self.axis_name])
                return mapped(state._replace(in_flight=in_flight), *batch)

            return jax.jit(checked, donate_argnums=(0,) if self.donate else ())

        return (
            program(self._local_step, (specs, data), (specs, P())),
            program(self._local_drain, (specs,), specs),
        )

    def _local_step(
        self, state: PipelineState, batch: Any
    ) -> tuple[PipelineState, StepInfo]:
        """One device's part of a step: the recursion, read from top to bottom."""
        rng, key = self._split_rng(state.rng)
        message, after = self._local_message(
            state.params, state.model_state, batch, key
        )
        check_room(message, state.in_flight, self.width, self.reduce_dtype)
        mean, in_flight = self._pipeline.update(message, state.in_flight)
        arrived = state.in_flight.filled == self.width - 1
        state = state._replace(in_flight=in_flight, rng=rng)
        return apply_message(self.tx, state, mean, after, arrived)

    def _local_drain(self, state: PipelineState) -> PipelineState:
        """One device's part of a drain."""
        if self.width == 1:
            return state
        in_flight = state.in_flight
        like = empty_message(state.params, state.model_state)
        for age, mean in enumerate(in_flight_means(in_flight, self.axis_name)):
            message = buckets.unflatten(mean, like, self.reduce_dtype)
            arrived = age >= self.width - 1 - in_flight.filled
            state, _ = apply_message(
                self.tx, state, message, state.model_state, arrived
            )
        return state._replace(in_flight=jax.tree.map(jnp.zeros_like, in_flight))

    def _local_message(
        self, params: Any, model_state: Any, batch: Any, key: Any
    ) -> tuple[Message, Any]:
        return local_message(
            self.loss_fn,
            params,
            model_state,
            batch,
            key,
            microbatches=self.microbatches,
            compute_dtype=self.compute_dtype,
        )

    def _message_shape(
        self, params: Any, model_state: Any, rng: Any, batch: Any
    ) -> Message:
        """Zeros, or their shapes, in the form of the message of one device."""
        if batch is None:
            return empty_message(params, model_state)
        check_batch(batch, self.mesh.shape[self.axis_name], self.microbatches)

        def local(params: Any, model_state: Any, rng: Any, batch: Any) -> Message:
            _, key = self._split_rng(rng)
            return self._local_message(params, model_state, batch, key)[0]

        local = self._on_mesh(local, (P(), P(), P(), P(self.axis_name)), P())
        return jax.eval_shape(local, params, model_state, rng, batch)

    def _split_rng(self, rng: Any) -> tuple[Any, Any]:
        """The key to carry on, and this device's own for this step."""
        if rng is None:
            return None, None
        rng, key = jax.random.split(rng)
        return rng, jax.random.fold_in(key, lax.axis_index(self.axis_name))

    def _warming_up(self, state: PipelineState) -> bool:
        if self.warmup_steps == 0:
            return False
        check_step_known(state.step)
        return int(state.step) < self.warmup_steps

    def _on_mesh(self, local: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
        # Without `check_vma` a gradient stays the device's own (with it, jax.grad sums
        # it over the mesh, in step), and any loss function is accepted as it is.
        return jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )


def _split(state: PipelineState) -> tuple[PipelineState, PipelinedMeanState]:
    """What a step may overwrite, and the gradients in flight, which it may not."""
    if not isinstance(state, PipelineState):
        raise ValueError(
            "`state` must be the pj.PipelineState that `train.init` returned, got"
            f" {type(state).__name__}."
        )
    rest = state._replace(in_flight=None, step=None)  # type: ignore[arg-type]
    return rest, state.in_flight
