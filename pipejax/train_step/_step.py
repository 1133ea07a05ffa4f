"""A train step of width K on a mesh.

One step, in full:

1. every device computes its message: gradient, loss, metrics, change of model state
2. the pipeline trades it for the sum of the messages of K-1 steps ago
3. the update applies that, unless it has not arrived or is not finite

Warm-up is the same step at width 1, past an empty pipeline; draining is 3 alone, for
each message still in flight.
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

from ._check import (
    check_batch,
    check_in_flight,
    check_not_pipelined,
    check_params,
    check_room,
    check_state,
)
from ._gradient import Loss, empty_message, local_message
from ._pipeline import (
    PipelinedMeanState,
    advance,
    empty_pipeline,
    in_flight_sums,
)
from ._state import Message, PipelineState, StepInfo, pipeline_specs
from ._update import apply_message


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
        check_not_pipelined(
            jax.eval_shape(self.tx.init, params) if opt_state is None else opt_state
        )
        replicated = NamedSharding(self.mesh, P())
        params, model_state, rng, opt_state = args = jax.device_put(
            (params, model_state, rng, opt_state), replicated
        )
        message = self._message_shape(params, model_state, rng, batch)
        sizes = buckets.sizes(message, self.reduce_dtype)

        def make(params: Any, model_state: Any, rng: Any, opt_state: Any) -> Any:
            return PipelineState(
                params=params,
                opt_state=self.tx.init(params) if opt_state is None else opt_state,
                model_state=model_state,
                in_flight=empty_pipeline(sizes, self.width),
                rng=rng,
                skipped=jnp.zeros((), jnp.int32),
                step=jnp.zeros((), jnp.int32),
                warmup_left=None,
            )

        specs = pipeline_specs(self.axis_name)
        state: PipelineState = jax.jit(self._on_mesh(make, P(), specs))(*args)
        warmup = np.int32(self.warmup_steps) if self.warmup_steps else None
        return state._replace(warmup_left=warmup)

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
        check_state(state, self._data.device_set)
        if state.warmup_left and self.width > 1:
            # The pipeline stays empty while the synchronous twin goes past it.
            empty = state.in_flight._replace(pending={}, reduced=())
            after, info = self.plain.step(state._replace(in_flight=empty), batch)
            left = state.warmup_left - np.int32(1)
            return after._replace(in_flight=state.in_flight, warmup_left=left), info
        check_batch(batch, self.mesh.shape[self.axis_name], self.microbatches)
        batch = jax.tree.map(self._laid_out, batch)
        self._wait_for(state)
        after, info = self._programs[0](*_split(state), batch)
        return after._replace(warmup_left=state.warmup_left), info

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
        check_state(state, self._data.device_set)
        self._wait_for(state)
        return self._programs[1](*_split(state))._replace(warmup_left=state.warmup_left)

    def lower(self, state: PipelineState, batch: Any) -> jax.stages.Lowered:
        """The step's program, lowered: to be read, counted or compiled.

        Args:
          state: a state, or `jax.eval_shape(train.init, params)`.
          batch: arrays or `jax.ShapeDtypeStruct`s.

        Returns:
          The `jax.stages.Lowered` of what `step` runs once warm-up is over.

        Raises:
          ValueError: as `step`.
        """
        check_state(state, self._data.device_set)
        check_batch(batch, self.mesh.shape[self.axis_name], self.microbatches)
        return self._programs[0].lower(*_split(state), batch)

    @functools.cached_property
    def plain(self) -> "TrainStep":
        """The synchronous twin: the same step at width 1."""
        return dataclasses.replace(self, width=1, warmup_steps=0)

    @functools.cached_property
    def _programs(self) -> tuple[jax.stages.Wrapped, jax.stages.Wrapped]:
        """The step and the drain, each compiled once in a run."""
        specs, data = pipeline_specs(self.axis_name), P(self.axis_name)

        def program(local: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
            mapped = self._on_mesh(local, in_specs, out_specs)

            def checked(state: PipelineState, in_flight: Any, *batch: Any) -> Any:
                devices = self.mesh.shape[self.axis_name]
                least = buckets.sizes(state.params, self.reduce_dtype)
                check_in_flight(in_flight, self.width, devices, least)
                return mapped(state._replace(in_flight=in_flight), *batch)

            shardings = (None, None, self._data)[: 1 + len(in_specs)]
            return jax.jit(
                checked,
                in_shardings=shardings,
                donate_argnums=(0,) if self.donate else (),
            )

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
        arrived = state.in_flight.filled == self.width - 1
        fresh = buckets.flatten(message, self.reduce_dtype)
        total, in_flight = advance(state.in_flight, fresh, self.axis_name)
        state = state._replace(in_flight=in_flight, rng=rng, step=state.step + 1)
        return self._apply(state, total, message, after, arrived)

    def _local_drain(self, state: PipelineState) -> PipelineState:
        """One device's part of a drain."""
        if self.width == 1:
            return state
        in_flight = state.in_flight
        like = empty_message(state.params, state.model_state)
        for age, total in enumerate(in_flight_sums(in_flight, self.axis_name)):
            arrived = age >= self.width - 1 - in_flight.filled
            state, _ = self._apply(state, total, like, state.model_state, arrived)
        return state._replace(in_flight=jax.tree.map(jnp.zeros_like, in_flight))

    def _apply(
        self, state: PipelineState, total: Any, like: Any, after: Any, arrived: Any
    ) -> tuple[PipelineState, StepInfo]:
        return apply_message(
            self.tx,
            state,
            total,
            like,
            after,
            arrived,
            axis_name=self.axis_name,
            reduce_dtype=self.reduce_dtype,
        )

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
        """The shapes of one device's message."""
        if batch is None:
            return jax.eval_shape(empty_message, params, model_state)
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

    @functools.cached_property
    def _data(self) -> NamedSharding:
        return NamedSharding(self.mesh, P(self.axis_name))

    @functools.cached_property
    def _shares_threads(self) -> bool:
        here = [
            d for d in self.mesh.devices.flat if d.process_index == jax.process_index()
        ]
        return len(here) > 1 and here[0].platform == "cpu"

    def _wait_for(self, state: PipelineState) -> None:
        """On several CPU devices of one process, the step before, to its end.

        They share one pool of threads, and an all-reduce holds one for each device
        until all have come. Of two steps at once each may hold what the other waits
        for, and neither ends.
        """
        if self._shares_threads and not isinstance(state.step, jax.core.Tracer):
            jax.block_until_ready(state.step)

    def _laid_out(self, leaf: Any) -> Any:
        """An array that lies elsewhere on purpose, moved; `jit` places all others."""
        if isinstance(leaf, jax.core.Tracer) or not isinstance(leaf, jax.Array):
            return leaf
        if leaf.committed and leaf.sharding != self._data:
            return jax.device_put(leaf, self._data)
        return leaf

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
    rest = state._replace(in_flight=None, warmup_left=None)  # type: ignore[arg-type]
    return rest, state.in_flight
