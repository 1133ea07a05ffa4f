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

**Prediction.** The rule of `_core.prediction` is that of the unsharded pipeline. A
device cannot expand an update whose state other devices have. Their owners do it, once
they have the new mean m: in place of the parameters w, devices gather
`c = w + U(m; s) - P m`, and P in 8 bits beside it. A device then predicts `c + P g`
with its own gradient g. If P depends on nothing that is split, devices find it
themselves.

Before any mean is known, `w + U(g; s)` needs the state s of all devices. It is then the
one with which the optimizer begins, which every device can make. An optimizer that
continues from a given state is expanded at m = 0 instead.

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
from jax.typing import DTypeLike

from pipejax._core.message import (
    Exchange,
    InFlight,
    Message,
    Reduced,
    arrivals,
    layout_of,
    message_of,
    on_shards_of,
    summands,
)
from pipejax._core.pieces import NotElementwiseError, Program, on_pieces, stages_of
from pipejax._core.prediction import (
    CODE,
    Kind,
    Mean,
    Slopes,
    anchored,
    changed,
    expanded,
    of_words,
    to_words,
    word_form,
)
from pipejax._internal.shards import UNSHARDED, Shards, as_on_shards, constrained
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
      mean: Pieces of the mean gradient that was applied last, or `None`.
      ahead: Pieces of the parameters to gather.
      codes: Pieces of the slopes to gather, or `None`.
      steepest: Bounds of the slopes, or `None`.
      finite: Whether all reduced gradients and changes are finite.
      changes: Sums of the changes of model state.
      passengers: Sums of loss, metrics and weight.
    """

    params: Any
    opt_state: Any
    mean: Mean | None
    ahead: Any
    codes: Any
    steepest: Any
    finite: Any
    changes: Any
    passengers: Any


@dataclasses.dataclass(frozen=True, eq=False)
class PiecewiseStep(LocalStep):
    """A loss and an optimizer that is sharded over devices, inside `shard_map`.

    Attributes:
      slope_dtype: dtype in which devices gather slopes, of 8 bits or for tests more.
    """

    slope_dtype: DTypeLike = CODE

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
            program = self.program(whole, message, state, len(behind), places)
            check_places(_after(program, places), places)
        sizes = places.devices.sizes
        halved, layout = on_shards_of(message, all_reduce), layout_of(message)
        if shards:
            halved, layout = halved.of_one_device(sizes), halved.shard(layout, sizes)
        forms, gather = self._gathered_forms(whole, places), halved
        if sends_slopes := _sends_slopes(state, len(behind)):
            dtypes = map(self._slope_dtype, forms)
            codes = [x.update(dtype=d) for x, d in zip(forms, dtypes, strict=True)]
            forms = [*forms, *map(word_form, codes * len(behind))]
            gather = Halved(all_reduce, shards.cuts * (1 + len(behind)))

        def enter(value: Any, states: Any) -> tuple[Any, Any]:
            sums, rest = value
            return program.run(0, jax.tree.leaves((sums, rest))), states

        def leave(value: Any, states: Any) -> tuple[Any, Any]:
            found = program.result(value)
            sent = tuple(map(to_words, _to_gather(program, found, places)))
            return (sent, found._replace(ahead=None, codes=None)), states

        def end(value: Any) -> Reduced:
            gathered, found = value
            structure, count = jax.tree.structure(state.params), len(shards.cuts)
            ahead, *codes = (
                jax.tree.unflatten(structure, gathered[i : i + count])
                for i in range(0, len(gathered), count)
            )
            slopes = state.slopes
            if slopes is not None and sends_slopes:
                sent = jax.tree.map(of_words, tuple(codes), slopes.codes)
                slopes = Slopes(sent, found.steepest)
            return Reduced(
                sum=Message(None, found.changes, found.passengers, shards),
                arrived=arrived,
                finite=found.finite,
                updated=Learned(
                    params=found.params,
                    opt_state=found.opt_state,
                    gathered=ahead,
                    mean=found.mean,
                    slopes=slopes,
                    shards=state.shards,
                ),
            )

        stages = (
            on_first(halved.reduce_scatter(layout, name))
            + Stages((Local(enter),))
            + stages_of(program, places.devices, silent=halved.silent)
            + Stages((Local(leave),))
            + on_first(gather.all_gather(forms, name))
        )
        learned = state.params, state.opt_state, state.mean
        start = summands(message), (learned, (arrived, [*behind]))
        if shards:
            stages = on_own_shards(stages, *_specs(message, start, forms, places))
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
        self,
        params: Any,
        message: Message,
        state: SharedState | Learned,
        behind: int,
        places: Places,
    ) -> Program:
        """Returns what a device does between the two halves of an exchange.

        Args:
          params: Shapes of the whole parameters.
          message: A message, or its shapes.
          state: State before the update, or its shapes.
          behind: Number of messages that will be in flight after the update.
          places: Where the pieces lie.

        Raises:
          NotElementwiseError: If the update needs more than pieces and sums.
        """
        sums, flag = layout_of(message).sums(), jax.ShapeDtypeStruct((), jnp.bool_)
        mean, sends_slopes = state.mean, _sends_slopes(state, behind)
        means = specs_of_means = None
        if mean is not None:
            means, specs_of_means = jax.eval_shape(lambda x: x, mean), _means(None)
            if mean.gradients is not None:
                whole = jax.tree.map(
                    lambda w, m: w.update(dtype=m.dtype), params, mean.gradients
                )
                means = means._replace(gradients=whole)
                specs_of_means = _means(places.params)
        forms = (
            Summands(sums.coded, sums.exact),
            ((params, places.whole_opt_state, means), (flag, [flag] * behind)),
        )
        specs = (
            (places.params, exact_specs(message)),
            (
                (places.params, places.opt_state, specs_of_means),
                (P(), [P()] * behind),
            ),
        )

        def between(sums: Any, rest: Any) -> _Between:
            total = message_of(Summands(*sums), message)._replace(shards=UNSHARDED)
            learned, (arrived, behind) = rest
            return self.between(
                learned, total, arrived, behind, places, sends_slopes=sends_slopes
            )

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
                program = self.program(params, message, _NOTHING, 0, places)
                after = _after(program, places)
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
        learned: tuple[Any, Any, Mean | None],
        total: Message,
        arrived: jax.Array,
        behind: Sequence[jax.Array],
        places: Places,
        *,
        sends_slopes: bool,
    ) -> _Between:
        """Updates whole parameters and optimizer state by a summed message.

        Devices run this function on their pieces.

        Args:
          learned: Parameters, optimizer state and applied mean before the update.
          total: Sum of the messages of all devices.
          arrived: Whether the messages are real.
          behind: For each message that will be in flight after the update, whether it
            is real.
          places: Where the pieces lie.
          sends_slopes: Whether devices will need slopes.
        """
        reduced = Reduced.of(total, arrived)
        applied, _ = decided(reduced, skip_nonfinite=self.skip_nonfinite)
        new = advanced(self.tx, *learned, total, places.data)
        params, opt_state, mean = select(applied, new, learned)
        ahead, slopes = params, None
        kind = self.kind(params, len(behind), places.data)
        anchors = sends_slopes or (kind and not self._needs_slopes(kind, places))
        if kind is not None and mean is not None and anchors:
            given = kind, self.optimizer, params, opt_state, mean
            ahead, slopes = anchored(*given, behind, self.slope_dtype)
        return _Between(
            params=params,
            opt_state=opt_state,
            mean=mean,
            ahead=jax.tree.map(lambda x: x.astype(self.gathered_dtype(x)), ahead),
            codes=None if slopes is None else slopes.codes,
            steepest=None if slopes is None else slopes.steepest,
            finite=reduced.finite,
            changes=total.changes,
            passengers=total.passengers,
        )

    def point(self, state: SharedState, in_flight: InFlight) -> Any:
        """Returns the parameters at which this device takes its gradient."""
        gathered = jax.tree.map(
            lambda whole, own: whole.astype(own.dtype), state.gathered, state.params
        )
        if not self.weight_prediction or not in_flight.pending:
            return gathered
        if self._devices == 1:  # its pieces are whole
            # An argument that a program does not use is not donated to it.
            params = jax.tree.map(
                lambda whole, own: whole if whole.dtype == own.dtype else own,
                state.gathered,
                state.params,
            )
            return super().point(state._replace(params=params), in_flight)
        assert state.mean is not None  # because something is predicted
        needs_mean = state.mean.gradients is not None
        if needs_mean and state.slopes is None:  # elements mix
            return gathered
        whole = whole_params(state)
        own, slopes = self.own(whole, in_flight), self._slopes(state, in_flight)
        params = gathered
        for each, slope in zip(own, slopes, strict=True):
            params = jax.tree.map(
                lambda c, p, g: (c + p * g).astype(c.dtype),
                params,
                slope,
                each.gradients,
            )
        if needs_mean:
            new = self.tx.init(gathered)
            begun = state._replace(params=gathered, opt_state=new, slopes=None)
            params = select(state.mean.known, params, self.ahead(begun, in_flight))
        return constrained(params, state.shards.params)

    def in_pieces(self, state: SharedState, specs: Any, count: int) -> SharedState:
        """Returns the pieces of a whole state, and what every device has whole."""
        places = self._places(state.params, state.shards)
        gathered = jax.tree.map(
            lambda x: x.astype(self.gathered_dtype(x)), state.params
        )
        pieces = jax.tree.map(
            lambda x, spec: places.devices.piece(x, split_of(spec, x.ndim)),
            state,
            specs,
        )
        slopes = None
        kind = self.kind(state.params, count, places.data)
        if kind is not None and self._needs_slopes(kind, places):
            codes = jax.tree.map(
                lambda x: jnp.zeros(x.shape, self._slope_dtype(x)), state.params
            )
            steepest = jax.tree.map(lambda _: jnp.float32(0), state.params)
            slopes = Slopes((codes,) * count, (steepest,) * count)
        return pieces._replace(gathered=gathered, slopes=slopes)

    def empty_mean(
        self, params: Any, count: int, devices: int, shards: Shards
    ) -> Mean | None:
        """Returns the mean that predictions need before any is applied, or `None`.

        It has no gradients if devices find the slopes themselves.
        """
        kind = self.kind(params, count, devices)
        if kind is None:
            return None
        places = self._places(params, shards)
        mean = Mean.empty(params, self.reduce_dtype)
        if kind.name == "linear" and not self._needs_slopes(kind, places):
            return mean._replace(gradients=None)
        return mean

    def gathered_dtype(self, leaf: Any) -> Any:
        """Returns the dtype in which a parameter is gathered."""
        if self.compute_dtype is None or not is_floating(leaf):
            return leaf.dtype
        return jnp.dtype(self.compute_dtype)

    def _slope_dtype(self, leaf: Any) -> Any:
        """Returns the dtype in which the slopes of a parameter are gathered."""
        return CODE if self.slope_dtype == CODE else leaf.dtype

    def _needs_slopes(self, kind: Kind, places: Places) -> bool:
        """Returns whether slopes depend on what is split over the data."""
        if kind.name == "mixing":
            return False
        read = jax.tree.leaves(kind.opt_state)
        cuts = zip(read, places.opt_state_cuts, strict=True)
        split = any(used and cut is not None for used, cut in cuts)
        return kind.name != "linear" or kind.params or split

    def _slopes(self, state: SharedState, in_flight: InFlight) -> tuple[Any, ...]:
        """Returns the slopes of the update, for each gradient in flight.

        A state without slopes is one whose slopes depend on nothing that is split.
        """
        if state.slopes is not None:
            return state.slopes.decoded()
        whole = whole_params(state)
        known = self._known(state.opt_state, self._places(whole, state.shards))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), whole)
        count, real = len(in_flight.pending), arrivals(in_flight)
        losses = [jnp.float32(0)] * count

        def change(*gradients: Any) -> Any:
            return changed(self.optimizer, zeros, known, gradients, losses, real)

        return expanded(change, [zeros] * count)[1]

    def _known(self, opt_state: Any, places: Places) -> Any:
        """Returns the whole optimizer state, with zeros in place of what is split."""
        leaves, structure = jax.tree.flatten(places.whole_opt_state)
        own, cuts = jax.tree.leaves(opt_state), places.opt_state_cuts
        found = [
            leaf if cut is None else jnp.zeros(form.shape, form.dtype)
            for form, leaf, cut in zip(leaves, own, cuts, strict=True)
        ]
        return jax.tree.unflatten(structure, found)

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


class _NoMean(NamedTuple):
    """A state that needs no mean and no slopes."""

    mean: None = None
    slopes: None = None


_NOTHING: Any = _NoMean()


def _sends_slopes(state: Any, behind: int) -> bool:
    """Returns whether devices gather slopes for this number of messages."""
    return state.slopes is not None and len(state.slopes.codes) == behind


def _to_gather(program: Program, found: _Between, places: Places) -> list[jax.Array]:
    """Returns this device's pieces of parameters and slopes, for all to gather.

    What follows from numbers alone, such as the slopes of a frozen parameter, is whole
    on every device.

    Args:
      program: The update, which returned `found`.
      found: What an exchange has updated.
      places: Where the pieces lie.
    """
    numbers = jax.tree.unflatten(program.tree, range(program.tree.num_leaves))
    at = [*jax.tree.leaves(numbers.ahead), *jax.tree.leaves(numbers.codes)]
    arrays = [*jax.tree.leaves(found.ahead), *jax.tree.leaves(found.codes)]
    specs = places.params * (len(arrays) // len(places.params))

    def piece(number: int, x: jax.Array, spec: P) -> jax.Array:
        wanted = places.devices.divides(split_of(spec, x.ndim))
        if program.splits[number] == wanted:
            return x
        assert not any(program.splits[number])
        return places.devices.piece(x, wanted)

    return list(map(piece, at, arrays, specs))


def _means(specs: Any) -> Any:
    """Returns the specs of a mean whose gradients are split by `specs`."""
    whole: Any = P()
    return Mean(specs, whole, whole)


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


def _specs(
    message: Message, start: Any, forms: Sequence[Any], places: Places
) -> tuple[Any, Any]:
    """Returns how the values before and after an exchange are split over inner axes.

    Args:
      message: The message.
      start: The value before the exchange.
      forms: Shapes and dtypes of the arrays that are gathered.
      places: Where the pieces lie.
    """
    exact = exact_specs(message)
    structure = jax.tree.structure((message.changes, message.passengers))
    changes, passengers = jax.tree.unflatten(structure, exact)
    _, ((params, _, mean), flags) = start
    times = len(forms) // len(places.params)
    inside = jax.tree.unflatten(jax.tree.structure(params), places.params_inside)
    means = None
    if mean is not None:
        means = _means(None if mean.gradients is None else inside)
    learned = inside, places.opt_state_inside, means
    before = (
        Summands(places.params_inside, exact),
        (learned, jax.tree.map(lambda _: P(), flags)),
    )
    found = _Between(*learned, None, None, P(), P(), changes, passengers)
    return before, (places.params_inside * times, found)
