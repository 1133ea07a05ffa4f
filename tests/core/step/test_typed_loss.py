"""Tests losses that see the axis types of the mesh, against meshes of type Auto."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax import checkpoint, codecs, collectives

from ...grid import each, grid
from ...helpers import normal_batches

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
KINDS = {
    "auto": (AUTO, AUTO, AUTO),
    "explicit": (EXPLICIT, EXPLICIT, EXPLICIT),
    "explicit inside": (AUTO, EXPLICIT, EXPLICIT),
    "mixed": (EXPLICIT, EXPLICIT, AUTO),
    "explicit groups": (EXPLICIT, AUTO, AUTO),
}
ROWS = P("fsdp")
SPLIT = {"up": P("fsdp", "tp"), "down": P(None, "fsdp"), "scale": P()}
FEEDBACK = collectives.two_shot(codecs.error_feedback(codecs.int8(64)))
OPTIONS = {
    "width 1": {"width": 1},
    "default": {},
    "host executor": {"executor": "host"},
    "microbatches": {"microbatches": 2},
    "sharded optimizer": {"shard_optimizer": True},
    "sharded optimizer, host": {
        "shard_optimizer": True,
        "executor": "host",
        "width": 3,
    },
    "own": {"weight_prediction": "own"},
    "codec": {"all_reduce": FEEDBACK},
    "muon": {"tx": optax.contrib.muon(1e-2)},
}


def mesh_of(kind, sizes=(2, 2, 2)):
    return jax.make_mesh(
        sizes,
        ("host", "fsdp", "tp"),
        axis_types=KINDS[kind],
        devices=jax.devices()[: np.prod(sizes)],
    )


def place(mesh):
    rng = np.random.default_rng(0)
    params = {
        "up": rng.normal(size=(8, 16)).astype(np.float32) / 3,
        "down": rng.normal(size=(16, 4)).astype(np.float32) / 4,
        "scale": np.float32(1.1),
    }
    placed = {name: NamedSharding(mesh, spec) for name, spec in SPLIT.items()}
    return jax.device_put(params, placed)


class Net:
    """A loss that says how its activations are split as the mesh has it."""

    def __init__(self, kind, spec):
        explicit = KINDS[kind][1] == EXPLICIT
        self.types, self.spec = [], spec
        self.split = (
            jax.sharding.reshard if explicit else jax.lax.with_sharding_constraint
        )
        self.out = {"out_sharding": spec} if explicit else {}

    def __call__(self, params, batch, *, model_state=None, rng=None):
        x, y = (self.split(leaf, self.spec) for leaf in (batch["x"], batch["y"]))
        hidden = jnp.tanh(jnp.einsum("bi,ij->bj", x, params["up"], **self.out))
        found = jnp.einsum("bi,ij->bj", hidden, params["down"], **self.out)
        loss = params["scale"] * jnp.mean((found - y) ** 2)
        self.types.append([str(jax.typeof(v)) for v in (params["up"], x, hidden)])
        if model_state is None:
            return loss
        noise = 0.01 * jax.random.normal(rng)
        moved = {
            "mean": 0.9 * model_state["mean"] + 0.1 * params["up"],
            "fixed": model_state["fixed"],
        }
        return loss + noise, pj.Aux({"top": hidden.max()}, moved, jnp.float32(3))


def started(kind, sizes=(2, 2, 2), full=False, spec=ROWS, **options):
    """Returns the loss, the train step and the first state."""
    mesh, net = mesh_of(kind, sizes), Net(kind, spec)
    options = {"tx": optax.adamw(1e-2)} | options
    train = pj.make_train_step(net, mesh=mesh, axis_name="host", **options)
    given = {}
    if full:
        mean = jax.device_put(
            np.zeros((8, 16), np.float32), NamedSharding(mesh, SPLIT["up"])
        )
        state = {"mean": mean, "fixed": np.float32(np.inf)}
        (batch,) = normal_batches(1, size=16, inputs=8, outputs=4)
        given = {"model_state": state, "rng": jax.random.key(0), "batch": batch}
    return net, train, train.init(place(mesh), **given)


def stepped(train, state, steps=4):
    for batch in normal_batches(steps, size=16, inputs=8, outputs=4):
        batch = train.batch(batch, axis_name=("host", "fsdp"))
        state, _ = train.step(state, batch)
    return state


def assert_close(a, b):
    """Asserts that two states are equal but for roundings."""
    for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=0, atol=3e-7)


def trained(kind, **options):
    _, train, state = started(kind, **options)
    state, _ = train.drain(stepped(train, state))
    return state.params, state.opt_state, state.model_state


@pytest.mark.parametrize("kind", each(["auto", "explicit"], full=["auto"]))
def test_sharded_optimizer_has_pieces_of_a_shard(kind):
    """The second matrix has an axis that groups do not split."""
    _, _, state = started(kind, shard_optimizer=True)
    assert state.params["down"].sharding.spec == P("host", "fsdp")
    assert state.params["up"].sharding.spec == P("fsdp", "tp")


@pytest.mark.parametrize(
    "name",
    each([*OPTIONS], full=[x for x in OPTIONS if x != "default"]),
)
def test_explicit_axes_change_roundings_only(name):
    options = OPTIONS[name]
    assert_close(trained("explicit", **options), trained("auto", **options))


@pytest.mark.full
@grid(0, sharded=[True, False], kind=["mixed", "explicit inside", "explicit groups"])
def test_mixed_axes_change_roundings_only(kind, sharded):
    wanted = trained("auto", shard_optimizer=sharded)
    assert_close(trained(kind, shard_optimizer=sharded), wanted)


@pytest.mark.full  # in the quick run, its arrays keep their types
@pytest.mark.parametrize("executor", ["fused", "host"])
def test_full_form_on_explicit_axes_changes_roundings_only(executor):
    options = {"full": True, "executor": executor, "width": 3}
    assert_close(trained("explicit", **options), trained("auto", **options))


@pytest.mark.parametrize(
    ("kind", "types"),
    [
        ("explicit", ["float32[8@fsdp,16@tp]", "float32[8@fsdp,8]"]),
        ("mixed", ["float32[8@fsdp,16]", "float32[8@fsdp,8]"]),
        ("auto", ["float32[8,16]", "float32[8,8]"]),
    ],
)
def test_loss_sees_the_types_of_the_mesh(kind, types):
    net, train, state = started(kind)
    stepped(train, state, 1)
    assert net.types[-1][:2] == types


def test_loss_sees_axes_of_size_one():
    net, train, state = started("explicit", (2, 2, 1), shard_optimizer=True)
    _, like, other = started("auto", (2, 2, 1), shard_optimizer=True)
    state, other = stepped(train, state), stepped(like, other)
    assert net.types[-1][0] == "float32[8@fsdp,16@tp]"
    assert_close(state.params, other.params)


def test_activations_are_split_as_the_loss_says():
    def memory(spec):
        """Returns the bytes of a step beside its arguments and results."""
        _, train, state = started("explicit", spec=spec, width=1)
        (batch,) = normal_batches(1, size=8192, inputs=8, outputs=4)
        batch = train.batch(batch, axis_name=("host", "fsdp"))
        return train.lower(state, batch).compile().memory_analysis().temp_size_in_bytes

    assert memory(ROWS) < 0.7 * memory(P())


@grid(0, executor=["fused", "host"], kind=["mixed", "explicit", "explicit inside"])
def test_arrays_keep_their_types(kind, executor):
    _, train, state = started(kind, full=True, executor=executor)
    after = train.drain(stepped(train, state, 2))[0]
    for x, y in zip(*map(jax.tree.leaves, (state, after)), strict=True):
        assert jax.typeof(x) == jax.typeof(y)
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
    with jax.set_mesh(train.mesh):  # as an evaluation
        assert np.isfinite(jnp.sum(after.params["up"]) + after.skipped)


@pytest.mark.parametrize("sharded", each([True, False], full=[True]))
def test_loop_over_traced_steps_takes_the_same_steps(sharded):
    net, train, state = started("explicit", shard_optimizer=sharded, executor="fused")
    wanted = stepped(train, state)
    data = normal_batches(4, size=16, inputs=8, outputs=4)
    data = jax.tree.map(lambda *leaves: np.stack(leaves), *data)
    split = NamedSharding(train.mesh, P(None, ("host", "fsdp")))
    with jax.set_mesh(train.mesh):
        found, _ = jax.lax.scan(
            lambda state, batch: (train.step(state, batch)[0], None),
            state,
            jax.device_put(data, split),
        )
    assert net.types[-1][1] == "float32[8@fsdp,8]"
    assert_close(found.params, wanted.params)


@pytest.mark.full  # in the quick run, tests/checkpoint/test_switches.py
@pytest.mark.parametrize("name", ["codec", "sharded optimizer"])
@pytest.mark.parametrize("kinds", [("explicit", "auto"), ("auto", "explicit")])
def test_checkpoints_are_restored_on_axes_of_other_types(tmp_path, kinds, name):
    (_, train, state), (_, other, like) = (started(x, **OPTIONS[name]) for x in kinds)
    state = stepped(train, state, 3)
    with checkpoint.manager(tmp_path) as manager:
        checkpoint.save(manager, state)
        restored = checkpoint.restore(manager, other, like)
    assert not restored.drained
    state, found = (stepped(*x) for x in ((train, state), (other, restored.state)))
    assert_close(found, state)


def test_layers_are_cut_between_stages():
    """An exchange of several stages cuts a scan whose carry has an Explicit type."""
    mesh = mesh_of("explicit")

    def loss_fn(layers, batch):
        def layer(x, w):
            return jnp.tanh(jnp.dot(x, w, out_sharding=ROWS)), None

        x, _ = jax.lax.scan(layer, jax.sharding.reshard(batch, ROWS), layers)
        return jnp.mean(x**2)

    def run(all_reduce):
        train = pj.make_train_step(
            loss_fn,
            optax.sgd(1.0),
            mesh=mesh,
            axis_name="host",
            executor="fused",
            all_reduce=all_reduce,
        )
        layers = np.random.default_rng(0).normal(size=(6, 4, 4)).astype(np.float32)
        placed = NamedSharding(mesh, P(None, "fsdp", "tp"))
        state = train.init(jax.device_put(layers, placed))
        for i in range(2):
            batch = np.random.default_rng(i).normal(size=(8, 4)).astype(np.float32)
            state, _ = train.step(state, train.batch(batch))
        return train.drain(state)[0].params

    assert_close(run(collectives.ring()), run(collectives.psum()))


@pytest.mark.parametrize(
    "all_reduce", [collectives.psum(), collectives.ring()], ids=["psum", "ring"]
)
def test_lookup_over_all_axes_is_taken(all_reduce):
    """`jax.sharding.auto_axes` without axes, as in `flax.nnx.Embed`."""
    mesh = jax.make_mesh((2, 2), ("host", "fsdp"), devices=jax.devices()[:4])

    def loss_fn(table, tokens):
        take = jax.sharding.auto_axes(out_sharding=P("fsdp"))(jnp.take)
        return jnp.mean(take(table, tokens, axis=0) ** 2)

    train = pj.make_train_step(
        loss_fn,
        optax.sgd(1.0),
        mesh=mesh,
        axis_name="host",
        all_reduce=all_reduce,
        executor="fused",
    )
    table = np.arange(32, dtype=np.float32).reshape(8, 4) / 32
    tokens = np.arange(16) % 8
    state = train.init(jax.device_put(table, NamedSharding(mesh, P(None, "fsdp"))))
    state, _ = train.step(state, train.batch(tokens, axis_name=("host", "fsdp")))
    state, _ = train.drain(state)
    np.testing.assert_allclose(state.params, table - 2 * table / 32, rtol=1e-6)


def test_axes_split_by_types_alone_are_used():
    """No warning is given that all devices compute the same."""
    mesh = mesh_of("explicit")

    def loss_fn(w, batch):
        return jnp.mean(jax.sharding.reshard(batch, P("fsdp", "tp")) * w[None, :]) ** 2

    train = pj.make_train_step(loss_fn, optax.sgd(0.1), mesh=mesh, axis_name="host")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train.step(train.init(jnp.ones(4)), np.ones((8, 4), np.float32))
