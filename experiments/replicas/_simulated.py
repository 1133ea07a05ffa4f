"""Runs a train step for any number of replicas on one device, as `jax.vmap` maps it.

A step is a program of one device, in which collectives name the axis of the data. Here
`jax.vmap` gives this axis, in place of `jax.shard_map`, so that it is the same program.
"""

import bisect
import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import pipejax as pj
from pipejax._core.executors import StepConfig, delayed_part, run_at_once
from pipejax._core.message import (
    InFlight,
    at_width_1,
    codec_states,
    joined_states,
    parted_states,
    shift,
    valid_in_drain,
    valid_in_step,
)
from pipejax._core.step import Common, Inputs, InputSpecs, common_of

CHUNK = 50  # steps of one call
# All replicas have the same number of messages in flight.
_QUEUES: Any = InFlight(pending=0, filled=None, codec_states=0)  # type: ignore[arg-type]


class State(NamedTuple):
    """The state of all replicas.

    Attributes:
      common: What is the same on all of them.
      in_flight: The queues of all of them, along a leading axis.
    """

    common: Common
    in_flight: InFlight


class Simulated:
    """A train step of one device, run for several replicas.

    Args:
      train: A train step on a mesh of one device.
      replicas: The number of replicas, which divides every batch.
    """

    def __init__(self, train: pj.TrainStep, replicas: int) -> None:
        if train.mesh.size != 1:
            raise ValueError(
                "`train` must be a train step on a mesh of one device; got"
                f" {train.mesh.size} devices. Pass mesh=pj.data_mesh(1)."
            )
        self.train, self.replicas = train, replicas
        self._programs = [
            jax.jit(functools.partial(self._steps, phase), donate_argnums=0)
            for phase in train.phases
        ]

    def init(self, params: Any, rng: Any = None) -> State:
        """Returns the state before the first step."""
        state = self.train.init(params, rng=rng)
        common = common_of(state)
        trained = self._of_all(common)
        queues = jax.tree.map(
            lambda x: jnp.repeat(x[None], self.replicas, axis=0), state.in_flight
        )
        queues = queues._replace(
            filled=state.in_flight.filled, codec_states=self._codec_states(state)
        )
        return State(common._replace(trainable=trained), queues)

    def run(self, state: State, batches: Iterator[Any], steps: int) -> Any:
        """Takes steps; returns the state, and the loss that each of them reports."""
        losses, ends = [], self.train.boundaries
        starts = sorted({*range(0, steps, CHUNK), *(x for x in ends if x < steps)})
        for start, end in itertools.pairwise([*starts, steps]):
            taken = [self._shares(next(batches)) for _ in range(end - start)]
            stacked = jax.tree.map(lambda *x: np.stack(x), *taken)
            program = self._programs[bisect.bisect_right(ends, start)]
            state, infos = program(state, stacked)
            losses.append(np.asarray(infos.loss))
        return state, np.concatenate(losses)

    def drained(self, state: State) -> Any:
        """Returns the parameters after everything in flight is applied."""

        def local(common: Common, queue: InFlight) -> Any:
            config, step = self.train.config, self.train.config.step
            states, _ = parted_states(queue.codec_states)
            for age, message in enumerate(queue.pending):
                valid = valid_in_drain(queue, age)
                exchange = step.exchange(
                    common.trainable, message, valid, config.sums_by
                )
                reduced, states = exchange.run(states)
                common, _ = step.apply(common, None, reduced, None)
            return common.trainable.params

        mapped = jax.vmap(
            local,
            in_axes=(None, _QUEUES),
            out_axes=None,
            axis_name=self.train.axis_name,
            axis_size=self.replicas,
        )
        return mapped(*state)

    def _of_all(self, common: Common) -> Any:
        """Returns what is trained, with what predictions need among replicas."""
        length, init = self.train.width - 1, self.train.config.step.init
        mapped = jax.vmap(
            lambda _: init(common.trainable, length),
            out_axes=None,
            axis_name=self.train.axis_name,
        )
        # Counters may be arrays that the state has twice, and are donated.
        return jax.tree.map(jnp.copy, mapped(jnp.zeros(self.replicas)))

    def _codec_states(self, state: pj.PipelineState) -> Any:
        """Returns the codec states of all replicas, which depend on their number."""
        config = self.train.config
        parts = config.empty_messages(
            state.trainable.whole_params, None, state.trainable.shards
        )
        configs = (config, config.at_once)

        def local(_: Any) -> Any:
            states = [
                codec_states(
                    part._replace(passengers=None), each.sums_by, self.train.axis_name
                )
                for part, each in zip(parts, configs, strict=True)
                if part is not None
            ]
            return joined_states(*states) if len(states) == 2 else states[0]

        mapped = jax.vmap(local, axis_name=self.train.axis_name)
        return mapped(jnp.zeros(self.replicas))

    def _shares(self, batch: Any) -> Any:
        def shares(x: Any) -> Any:
            return x.reshape(self.replicas, len(x) // self.replicas, *x.shape[1:])

        return jax.tree.map(shares, batch)

    def _steps(self, config: StepConfig, state: State, batches: Any) -> Any:
        step = jax.vmap(
            functools.partial(self._local_step, config),
            in_axes=(None, _QUEUES, 0),
            out_axes=(None, _QUEUES, None),
            axis_name=self.train.axis_name,
        )

        def body(state: State, batch: Any) -> Any:
            common, queues, info = step(*state, batch)
            return State(common, queues), info

        return jax.lax.scan(body, state, batches)

    def _local_step(
        self, config: StepConfig, common: Common, whole: InFlight, batch: Any
    ) -> Any:
        """Takes the step of one replica: computes, exchanges, and applies."""
        step, alone = config.step, config.width != self.train.width
        queue = at_width_1(whole) if alone else whole
        before, others = parted_states(queue.codec_states)
        inputs = Inputs(batch, None, InputSpecs())
        fresh, computed = step.compute(common, queue, inputs)
        at_once, others = run_at_once(config, computed, others)
        if at_once is not None:
            fresh = delayed_part(config, fresh, at_once)
        due = queue.pending[0] if queue.pending else fresh
        valid = valid_in_step(queue.filled[0], config.width - 1)
        exchange = step.exchange(common.trainable, due, valid, config.sums_by)
        reduced, after = exchange.run(before)
        common, info = step.apply(common, computed, reduced, at_once)
        after = joined_states(after, others)
        if alone:  # a synchronous step leaves the queue empty
            queue = whole._replace(codec_states=after)
        else:
            queue = shift(queue, fresh, after)
        return common, queue, info
