r"""One device's part of a step whose optimizer is sharded over devices (ZeRO-1).

An all-reduce is a reduce-scatter and an all-gather. With a sharded optimizer, the
update runs between the two:

1. The reduce-scatter leaves each device with its piece of the mean gradient.
2. The device updates its pieces of parameters and optimizer state.
3. The all-gather gives every device the new parameters.

The exchange sends the bytes of an all-reduce, while each device keeps and computes only
its share of the optimizer. At width K, all of the exchange needs nothing of the step
that it runs beside, and the recursion is that of the unsharded pipeline:

$$w_t = w_{t-1} - u(g_{t-K})$$

The update may need sums over whole gradients: whether all are finite, and the norm by
which they are clipped. A small all-reduce between the two halves carries these sums.

**Prediction.** A device cannot run the optimizer on its own gradient if other devices
have the optimizer's state. In place of the parameters w, devices therefore gather the
parameters c to which the optimizer would coast if the K-1 gradients in flight were
zero. Let `U(g; s)` be the change of the parameters by K-1 updates from the optimizer
state s. Then `c = w + U(0; s)`, and a device predicts

$$v_i = c + U(g_i; s') - U(0; s')$$

where s' is what the device knows of s. For an optimizer that is linear in gradients and
state, such as SGD with momentum, this is `w + U(g_i; s)` for any s', because the part
of the state cancels. The prediction is then that of the unsharded pipeline.

References:
  Rajbhandari et al., ZeRO, 2020, https://arxiv.org/abs/1910.02054
"""

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pipejax.collectives import (
    AllReduce,
    Halved,
    Local,
    Stages,
    Summands,
    on_first,
    on_own_shards,
    run,
)
from pipejax.message import (
    Exchange,
    InFlight,
    Message,
    Reduced,
    layout_of,
    mean,
    message_of,
    on_shards_of,
    summands,
)
from pipejax.pieces import Coarse, NotElementwiseError, Program, on_pieces, stages_of
from pipejax.shards import UNSHARDED, Shards, as_on_shards

from ._ahead import Needs, coarse_specs, coasted
from ._local_step import LocalStep
from ._loss import is_floating
from ._places import Places, check_places, exact_specs, spec_leaves, split_of
from ._state import Learned, SharedState, whole_params
from ._update import advanced, decided, select


class _Between(NamedTuple):
    """The result of the update, between the two halves of an exchange.

    Attributes:
      params: Pieces of the parameters after the update.
      opt_state: Pieces of the optimizer state after the update.
      ahead: Pieces of the parameters to gather.
      finite: Whether all reduced gradients and changes are finite.
      changes: Sums of the changes of model state.
      passengers: Sums of loss, metrics and weight.
    """

    params: Any
    opt_state: Any
    ahead: Any
    finite: Any
    changes: Any
    passengers: Any


@dataclasses.dataclass(frozen=True, eq=False)
class PiecewiseStep(LocalStep):
    """A loss and an optimizer that is sharded over devices, inside `shard_map`."""

    @property
    def shard_optimizer(self) -> bool:
        """Returns whether each device keeps only pieces of the optimizer."""
        return True

    def exchange(
        self,
        state: SharedState | Learned,
        message: Message,
        arrived: jax.Array,
        behind: Sequence[jax.Array],
        all_reduce: AllReduce,
    ) -> Exchange:
        """Returns the exchange that updates the optimizer between its two halves.

        Args:
          state: State before the update.
          message: The message of this device.
          arrived: Whether the message is real.
          behind: For each message that will be in flight after the update, whether it
            is real.
          all_reduce: The algorithm that sums messages.
        """
        name, shards, whole = self.axis_name, message.shards, whole_params(state)
        places = self._places(whole, shards)
        with as_on_shards() if shards else contextlib.nullcontext():
            program = self.program(whole, message, len(behind), places)
            check_places(_after(program, places), places)
        needs, sizes = Needs.of(self.tx, whole, places), places.devices.sizes
        halved, layout = on_shards_of(message, all_reduce), layout_of(message)
        if shards:
            halved, layout = halved.of_one_device(sizes), halved.shard(layout, sizes)
        forms = self._gathered_forms(whole, places)
        gather = halved
        if state.coarse is not None:
            sent = jax.ShapeDtypeStruct((needs.coarse.bytes,), jnp.uint8)
            forms = [*forms, sent]
            gather = Halved(all_reduce, (*shards.cuts, 0))

        def enter(value: Any, states: Any) -> tuple[Any, Any]:
            sums, (learned, flags, coarse) = value
            given = learned, sums.coded, sums.exact, flags
            return (program.run(0, jax.tree.leaves(given)), coarse), states

        def leave(value: Any, states: Any) -> tuple[Any, Any]:
            values, coarse = value
            found = program.result(values)
            ahead = [*jax.tree.leaves(found.ahead)]
            if coarse is not None:
                ahead.append(needs.coarse.slice(needs.chosen(found.opt_state), coarse))
            return (tuple(ahead), (found._replace(ahead=None), coarse)), states

        def renew(value: Any, states: Any) -> tuple[Any, Any]:
            gathered, (found, coarse) = value
            if coarse is not None:
                *gathered, sent = gathered
                coarse = needs.coarse.renewed(coarse, sent)
            return (tuple(gathered), found, coarse), states

        def end(value: Any) -> Reduced:
            gathered, found, coarse = value
            gathered = jax.tree.unflatten(jax.tree.structure(state.params), gathered)
            updated = found.params, found.opt_state, gathered, coarse
            return Reduced(
                sum=Message(None, found.changes, found.passengers, shards),
                arrived=arrived,
                finite=found.finite,
                updated=Learned(*updated, shards),
            )

        stages = (
            on_first(halved.reduce_scatter(layout, name))
            + Stages((Local(enter),))
            + on_first(stages_of(program, places.devices, silent=halved.silent))
            + Stages((Local(leave),))
            + on_first(gather.all_gather(forms, name))
            + Stages((Local(renew),))
        )
        learned, flags = (state.params, state.opt_state), (arrived, [*behind])
        start = summands(message), (learned, flags, state.coarse)
        if shards:
            stages = on_own_shards(stages, *_specs(message, start, places))
        # The forward pass is a third of the compute and makes no gradients yet.
        early = 1 / 3 if self.microbatches == 1 else 0.5
        return Exchange(start, stages, end, early)

    def spread(self, learned: Learned, all_reduce: AllReduce) -> Learned:
        """Gathers the parameters as they are, with no gradient in flight.

        Args:
          learned: This device's pieces.
          all_reduce: The algorithm that sums messages.
        """
        shards, whole = learned.shards, whole_params(learned)
        places = self._places(whole, shards)
        halved = Halved(all_reduce, shards.cuts)
        forms = self._gathered_forms(whole, places)
        stages = halved.all_gather(forms, self.axis_name)
        if shards:
            stages = on_own_shards(stages, places.params_inside, places.params_inside)
        leaves = jax.tree.leaves(learned.params)
        sent = tuple(x.astype(self.gathered_dtype(x)) for x in leaves)
        gathered, _ = run(stages, sent, {})
        structure = jax.tree.structure(learned.params)
        return learned._replace(gathered=jax.tree.unflatten(structure, gathered))

    def program(
        self, params: Any, message: Message, behind: int, places: Places
    ) -> Program:
        """Returns what a device does between the two halves of an exchange.

        Args:
          params: Shapes of the whole parameters.
          message: A message, or its shapes.
          behind: Number of messages that will be in flight after the update.
          places: Where the pieces lie.

        Raises:
          NotElementwiseError: If the update needs more than pieces and sums.
        """
        sums, flag = layout_of(message).sums(), jax.ShapeDtypeStruct((), jnp.bool_)
        forms = (
            (params, places.whole_opt_state),
            sums.coded,
            sums.exact,
            (flag, [flag] * behind),
        )
        specs = (
            (places.params, places.opt_state),
            places.params,
            exact_specs(message),
            (P(), [P()] * behind),
        )

        def between(learned: Any, coded: Any, exact: Any, flags: Any) -> _Between:
            total = message_of(Summands(coded, exact), message)
            total = total._replace(shards=UNSHARDED)
            params, opt_state = learned
            arrived, behind = flags
            return self.between(params, opt_state, total, arrived, behind, places.data)

        pairs = zip(spec_leaves(specs), jax.tree.leaves(forms), strict=True)
        splits = [split_of(spec, len(form.shape)) for spec, form in pairs]
        return on_pieces(between, forms, splits, places.devices)

    def placed(self, params: Any, message: Message, mesh: Mesh) -> Shards:
        """Returns how all arrays of a state are split.

        An array of the optimizer state is split as the values that an update writes
        into it, which follows from the splits of gradients, parameters and state. Each
        array that is found to be split may split others, so the update is planned
        until nothing changes.

        Args:
          params: Shapes of the whole parameters.
          message: A message, or its shapes. It says how the parameters are split.
          mesh: The mesh of the train step.

        Raises:
          ValueError: If devices cannot update their pieces by themselves.
        """
        shards = message.shards
        while True:
            places = Places.of(self.tx, params, shards, self.axis_name, mesh.shape)
            try:
                after = _after(self.program(params, message, 1, places), places)
            except NotElementwiseError as error:
                raise ValueError(
                    "`tx` must update each element from the gradient, the parameter and"
                    " the state at its place, and from sums or maxima over axes of an"
                    " array, because with shard_optimizer=True every device has only a"
                    f" piece of each array; got an operation `{error}`. Choose an"
                    " optimizer such as optax.adamw, or leave out shard_optimizer."
                ) from error
            shards = dataclasses.replace(shards, opt_state=after)
            if after == tuple(spec_leaves(places.opt_state)):
                return shards

    def between(
        self,
        params: Any,
        opt_state: Any,
        total: Message,
        arrived: jax.Array,
        behind: Sequence[jax.Array],
        devices: int,
    ) -> _Between:
        """Updates whole parameters and optimizer state by a summed message.

        Devices run this function on their pieces.

        Args:
          params: Parameters before the update.
          opt_state: Optimizer state before the update.
          total: Sum of the messages of all devices.
          arrived: Whether the messages are real.
          behind: For each message that will be in flight after the update, whether it
            is real.
          devices: Number of devices over which the messages were summed.
        """
        reduced = Reduced.of(total, arrived)
        applied, _ = decided(reduced, skip_nonfinite=self.skip_nonfinite)
        new = advanced(self.tx, params, opt_state, total, devices)
        params, opt_state = select(applied, new, (params, opt_state))
        ahead = params
        if self.weight_prediction:
            loss = mean(total.passengers.loss, total, devices)
            ahead = coasted(self.tx, params, opt_state, loss, behind)
        return _Between(
            params=params,
            opt_state=opt_state,
            ahead=jax.tree.map(lambda x: x.astype(self.gathered_dtype(x)), ahead),
            finite=reduced.finite,
            changes=total.changes,
            passengers=total.passengers,
        )

    def point(self, state: SharedState, in_flight: InFlight) -> SharedState:
        """Returns the state at whose parameters this device takes its gradient."""
        gathered = jax.tree.map(
            lambda whole, own: whole.astype(own.dtype), state.gathered, state.params
        )
        if not self.weight_prediction or not in_flight.pending:
            return state._replace(params=gathered)
        whole, shards = whole_params(state), state.shards
        places = self._places(whole, shards)
        needs = Needs.of(self.tx, whole, places)
        known = state._replace(
            params=gathered if needs.params else jax.tree.map(jnp.zeros_like, gathered),
            opt_state=needs.known(state.opt_state, state.coarse, places, shards),
            gathered=None,
            coarse=None,
        )
        moved = self.ahead(known, in_flight)
        zeros = tuple(
            x._replace(gradients=jax.tree.map(jnp.zeros_like, x.gradients))
            for x in in_flight.pending
        )
        still = self.ahead(known, in_flight._replace(pending=zeros))
        params = jax.tree.map(
            lambda c, a, b: c + (a - b), gathered, moved.params, still.params
        )
        return moved._replace(params=params)

    def in_pieces(
        self, state: SharedState, specs: Any, *, predicts: bool
    ) -> SharedState:
        """Returns the pieces of a whole state, and the copies that a device keeps."""
        places = self._places(state.params, state.shards)
        gathered = jax.tree.map(
            lambda x: x.astype(self.gathered_dtype(x)), state.params
        )
        pieces = jax.tree.map(
            lambda x, spec: places.devices.piece(x, split_of(spec, x.ndim)),
            state,
            specs,
        )
        coarse = None
        if predicts:
            coarse = self.copies(state.params, state.opt_state, state.shards)
        return pieces._replace(gathered=gathered, coarse=coarse)

    def copies(self, params: Any, opt_state: Any, shards: Shards) -> Coarse | None:
        """Returns the coarse copies that a prediction needs, or `None`.

        Args:
          params: The whole parameters, or their shapes.
          opt_state: The whole optimizer state.
          shards: How they are split.
        """
        needs = Needs.of(self.tx, params, self._places(params, shards))
        return needs.copied(opt_state, shards)

    def gathered_dtype(self, leaf: Any) -> Any:
        """Returns the dtype in which a parameter is gathered."""
        if self.compute_dtype is None or not is_floating(leaf):
            return leaf.dtype
        return jnp.dtype(self.compute_dtype)

    def _places(self, params: Any, shards: Shards) -> Places:
        """Returns where the pieces lie, inside the program of a step."""
        sizes = jax.sharding.get_abstract_mesh().shape
        return Places.of(self.tx, params, shards, self.axis_name, sizes)

    def _gathered_forms(self, params: Any, places: Places) -> list[Any]:
        """Returns shapes and dtypes of the pieces of parameters that are gathered."""
        found = []
        for leaf, spec in zip(jax.tree.leaves(params), places.params, strict=True):
            dtype = self.gathered_dtype(leaf)
            found.append(places.piece(leaf, spec).update(dtype=dtype))
        return found


def _after(program: Program, places: Places) -> tuple[P, ...]:
    """Returns how an update leaves the optimizer state, as a spec for each leaf.

    Args:
      program: The update, which returns a `_Between`.
      places: Where the pieces lie before it.

    Raises:
      NotElementwiseError: If the update would split a parameter further.
    """
    at = jax.tree.unflatten(program.tree, range(program.tree.num_leaves))
    params = jax.tree_util.tree_leaves_with_path(at.params)
    for (path, place), spec in zip(params, places.params, strict=True):
        if places.kept(spec, program.splits[place]) != spec:
            raise NotElementwiseError(
                f"update of params{jax.tree_util.keystr(path)} by arrays split apart"
            )
    before, leaves = spec_leaves(places.opt_state), jax.tree.leaves(at.opt_state)
    pairs = zip(before, leaves, strict=True)
    return tuple(places.kept(spec, program.splits[place]) for spec, place in pairs)


def _specs(message: Message, start: Any, places: Places) -> tuple[Any, Any]:
    """Returns how the values before and after an exchange are split over inner axes.

    Args:
      message: The message.
      start: The value before the exchange.
      places: Where the pieces lie.
    """
    exact, shards = exact_specs(message), message.shards
    structure = jax.tree.structure((message.changes, message.passengers))
    changes, passengers = jax.tree.unflatten(structure, exact)
    _, (learned, flags, coarse) = start
    params = jax.tree.structure(learned[0])
    inside = jax.tree.unflatten(params, places.params_inside), places.opt_state_inside
    copies = None if coarse is None else coarse_specs(shards)
    before = (
        Summands(places.params_inside, exact),
        (inside, jax.tree.map(lambda _: P(), flags), copies),
    )
    found = _Between(*inside, None, P(), changes, passengers)
    return before, (places.params_inside, found, copies)
