"""Collective-permutes: some devices send a payload to one other device each."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pipejax._internal.mesh import AxisName, axes, axis_size
from pipejax._internal.wire import Transfer

from ._sites import Parts, Site
from ._stages import Local, Sent, Stages, States, local, on_first

Pairs = Sequence[tuple[int, int]]  # ranks of sender and receiver


def among(axis_name: AxisName, ranks: Iterable[int]) -> jax.Array:
    """Returns whether the rank of this device is in `ranks`, as a bool scalar."""
    return (lax.axis_index(axis_name) == jnp.array([*ranks], jnp.int32)).any()


def permute(axis_name: AxisName, pairs: Pairs, size: int) -> Stages:
    """Returns a stage that sends a payload of `size` bytes along `pairs`.

    A device that receives no payload gets zeros.
    """
    transfer = Transfer("collective-permute", axis_size(axis_name), size)
    ordered, places = _in_mesh_order(axis_name)
    placed = [(places[a], places[b]) for a, b in pairs]

    def send(payload: jax.Array) -> jax.Array:
        return lax.ppermute(payload, ordered, placed)

    return Stages((Sent(send, (transfer,)),))


def _in_mesh_order(axis_name: AxisName) -> tuple[tuple[str, ...], list[int]]:
    """Returns axes in the order of their mesh.

    Also returns, for each rank along the axes as given, the rank along these. Alone of
    all collectives, `ppermute` counts ranks in the order of the mesh.
    """
    names = axes(axis_name)
    known = jax.sharding.get_abstract_mesh().axis_names
    order = sorted(names, key=known.index) if len(names) > 1 else names
    ranks = np.arange(axis_size(axis_name)).reshape([*map(axis_size, names)])
    given = ranks.transpose([names.index(name) for name in order]).ravel()
    return tuple(order), np.argsort(given).tolist()


def hand_over(axis_name: AxisName, pairs: Pairs, size: int) -> Stages:
    """Returns a stage that sends a payload of `size` bytes along `pairs`.

    Unlike in `permute`, a device that receives no payload keeps its own.
    """

    def choose(value: tuple[jax.Array, jax.Array]) -> jax.Array:
        received, own = value
        return jnp.where(among(axis_name, (to for _, to in pairs)), received, own)

    return twice() + on_first(permute(axis_name, pairs, size)) + local(choose)


def append_received(
    axis_name: AxisName, pairs: Pairs, size: int, position: int
) -> Stages:
    """Returns a stage on a list of payloads, which sends the one at `position`.

    What a device receives is appended to its list.
    """
    return (
        local(lambda payloads: (payloads[position], payloads))
        + on_first(permute(axis_name, pairs, size))
        + local(lambda value: [*value[1], value[0]])
    )


def send_and_add(site: Site, axis_name: AxisName, pairs: Pairs) -> Stages:
    """Returns a stage on a pair `(sent, own)`.

    It encodes and sends `sent`, and adds the received vector to `own`. A device that
    receives nothing keeps `own`, and one that sends nothing keeps its codec state.
    """
    senders, receivers = zip(*pairs, strict=True)
    every = axis_size(axis_name)

    def encode(sent: Parts, states: States) -> tuple[jax.Array, States]:
        # All devices run one program, so those that do not send encode, too.
        sends = None if len(senders) == every else among(axis_name, senders)
        return site.encode(sent, states, where=sends)

    def add(value: tuple[jax.Array, Parts]) -> Parts:
        payload, own = value
        sums = own + site.decode(payload)
        if len(receivers) == every:
            return sums
        # The zeros that other devices have received need not decode to zeros.
        receives = among(axis_name, receivers)
        return jax.tree.map(lambda s, o: jnp.where(receives, s, o), sums, own)

    encoded = Stages((Local(encode, encodes=True),), (site.init,))
    sent = on_first(encoded + permute(axis_name, pairs, site.bytes))
    return sent + local(add)


def twice() -> Stages:
    """Returns local work that makes a pair of a value, as `on_first` takes it."""

    def pair(value: Any) -> tuple[Any, Any]:
        return value, value

    return local(pair)
