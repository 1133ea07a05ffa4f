"""Tests models that groups of devices shard, against runs on as many single devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax import codecs, collectives
from pipejax.overlap import inspect

from ..helpers import assert_bits_equal, normal_batches

FULL = pytest.mark.full
# How the parameters are split over inner axes, by the axes that there are.
SPLITS = {
    ("fsdp",): {"up": P("fsdp"), "down": P(None, "fsdp"), "bias": P(None, "fsdp")},
    ("tp",): {"up": P(None, "tp"), "down": P("tp"), "bias": P(None, "tp")},
    ("fsdp", "tp"): {
        "up": P("fsdp", "tp"),
        "down": P("tp", "fsdp"),
        "bias": P(None, "tp"),
    },
    # The other devices of a group hold the same weights.
    ("fsdp", "spare"): {"up": P("fsdp")},
    ("half",): {"up": P("half")},
}
OPTIMIZERS = {
    "momentum": optax.sgd(0.05, momentum=0.9),
    "adamw": optax.adamw(1e-2),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
    "muon": optax.contrib.muon(1e-2),
}
FEEDBACK = codecs.error_feedback(codecs.int8(64))


def mesh_of(groups, inner):
    """Returns a mesh of groups with two devices along each inner axis."""
    sizes = (groups, *(2 for _ in inner))
    auto = (AxisType.Auto,) * len(sizes)
    devices = jax.devices()[: np.prod(sizes)]
    return jax.make_mesh(sizes, ("host", *inner), axis_types=auto, devices=devices)


def params():
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    return {
        "up": normal(8, 16) / 3,
        "bias": normal(1, 16),
        "down": normal(16, 4) / 4,
        "scale": np.float32(1.1),
    }


def sharded(mesh, inner):
    """Returns the parameters on the mesh, split over its inner axes."""
    split = SPLITS[inner]
    return {
        name: jax.device_put(leaf, NamedSharding(mesh, split.get(name, P())))
        for name, leaf in params().items()
    }


def loss_fn(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["up"] + params["bias"])
    return params["scale"] * jnp.mean((hidden @ params["down"] - batch["y"]) ** 2)


def elementwise(params, batch):
    """A loss without matmuls, whose gradients no sharding adds up in another order."""
    fit = [jnp.sum((w - jnp.mean(batch["x"])) ** 4) for w in jax.tree.leaves(params)]
    return sum(fit)


def batches(count):
    return normal_batches(count, size=16, inputs=8, outputs=4)


def run(train, state, *, axis_name=None, steps=5):
    """Returns the state and the losses after some steps and a drain."""
    infos = []
    for batch in batches(steps):
        batch = train.batch(batch, axis_name=axis_name)
        state, info = train.step(state, batch)
        infos.append(info)
    state, last = train.drain(state)
    losses = [x.loss for x in (*infos, *last) if x.arrived]
    return state, np.array(losses)


def both(groups, inner, loss=loss_fn, tx=OPTIMIZERS["adamw"], **options):
    """Returns a train step and the first state, for single devices and for groups."""
    flat, mesh = pj.data_mesh(groups), mesh_of(groups, inner)
    one = pj.make_train_step(loss, tx, mesh=flat, **options)
    many = pj.make_train_step(loss, tx, mesh=mesh, axis_name="host", **options)
    return (one, one.init(params())), (many, many.init(sharded(mesh, inner)))


def assert_close(state, other, losses, other_losses, rounding=3e-6):
    np.testing.assert_allclose(other_losses, losses, rtol=rounding)
    for leaf, wanted in zip(
        *map(jax.tree.leaves, (other.params, state.params)), strict=True
    ):
        np.testing.assert_allclose(leaf, wanted, rtol=0, atol=rounding)


QUICK = [(2, ("fsdp", "tp"), "clipped", 2, True)]
ALL = [
    (groups, inner, name, width, predicted)
    for groups in (2, 4)
    for inner in (("fsdp",), ("tp",))
    for name in OPTIMIZERS
    for width in (1, 2, 3)
    for predicted in ((False, True) if width > 1 else (False,))
]
ALL += [(2, ("fsdp", "tp"), "muon", 2, True), (2, ("fsdp", "spare"), "adamw", 1, False)]


@pytest.mark.filterwarnings("ignore:nothing is split over the mesh axis 'spare'")
@pytest.mark.parametrize(
    ("groups", "inner", "name", "width", "predicted"),
    [*QUICK, *(pytest.param(*x, marks=FULL) for x in ALL if x not in QUICK)],
)
def test_groups_train_like_as_many_devices(groups, inner, name, width, predicted):
    """A group does what a single device does, up to the order of its sums."""
    options = {"width": width, "weight_prediction": predicted}
    one, many = both(groups, inner, tx=OPTIMIZERS[name], **options)
    split = ("host", "fsdp") if "fsdp" in inner else None
    (state, losses), (other, others) = run(*one), run(*many, axis_name=split)
    assert_close(state, other, losses, others)


@pytest.mark.one_python
@pytest.mark.parametrize(
    ("name", "width"),
    [
        ("adamw", 2),
        *(
            pytest.param(name, width, marks=FULL)
            for name in ("momentum", "adamw")
            for width in (1, 2, 3)
            if (name, width) != ("adamw", 2)
        ),
    ],
)
def test_groups_have_the_same_bits_for_equal_order_of_sums(name, width):
    # Other predictions have bounds of slopes, which are norms.
    options = {"tx": OPTIMIZERS[name], "width": width, "weight_prediction": "own"}
    one, many = both(4, ("fsdp",), elementwise, **options)
    (state, _), (other, _) = run(*one), run(*many)
    assert_bits_equal(jax.device_get(other.params), jax.device_get(state.params))


def some_of(cases, *quick):
    """Returns the names of all cases, of which only the quick ones always run."""
    return [pytest.param(x, marks=() if x in quick else FULL) for x in cases]


OTHERS = {
    "microbatches": {"microbatches": 2},
    "host executor": {"executor": "host"},
    "own": {"width": 3, "weight_prediction": "own"},
    "two shots": {"all_reduce": collectives.two_shot()},
    "ring": {"all_reduce": collectives.ring()},
    "warm-up": {"warmup_steps": 2},
    "donated": {"donate": True},
    "bfloat16 in flight": {"reduce_dtype": jnp.bfloat16},
}


@pytest.mark.one_python
@pytest.mark.parametrize("name", some_of(OTHERS, "host executor"))
def test_groups_train_like_devices_with_every_option(name):
    one, many = both(2, ("fsdp",), **OTHERS[name])
    (state, losses), (other, others) = run(*one), run(*many, axis_name=("host", "fsdp"))
    # One bit more or less of a gradient may become one bit more or less of bfloat16.
    rounding = 1e-2 if name == "bfloat16 in flight" else 3e-6
    assert_close(state, other, losses, others, rounding)


def full_loss(params, batch, *, model_state, rng):
    """A loss with all that travels beside gradients, and a key."""
    x = batch["x"] + 0.01 * jax.random.normal(rng, batch["x"].shape)
    loss = loss_fn(params, batch | {"x": x})
    mean = 0.9 * model_state["mean"] + 0.1 * x.mean(axis=0)
    after = {"mean": mean, "seen": model_state["seen"] + 1}
    weight = jnp.sum(batch["y"] ** 2)
    return loss, pj.Aux({"first": x[0, 0]}, after, weight)


@pytest.mark.one_python
@pytest.mark.parametrize("dtype", [None, pytest.param(jnp.bfloat16, marks=FULL)])
def test_full_loss_of_a_group_equals_a_single_device(dtype):
    """A group gets one key, and its sharded model state follows the same recursion."""
    tx, batch = OPTIMIZERS["momentum"], batches(1)[0]
    mesh = mesh_of(2, ("fsdp",))
    mean = np.zeros(8, np.float32)
    state = {"mean": mean, "seen": np.int32(0)}
    split = jax.device_put(mean, NamedSharding(mesh, P("fsdp")))
    given = {"rng": jax.random.key(0), "batch": batch}
    one = pj.make_train_step(full_loss, tx, mesh=pj.data_mesh(2), compute_dtype=dtype)
    many = pj.make_train_step(
        full_loss, tx, mesh=mesh, axis_name="host", compute_dtype=dtype
    )
    first = one.init(params(), model_state=state, **given)
    placed = sharded(mesh, ("fsdp",))
    second = many.init(placed, model_state=state | {"mean": split}, **given)
    (wanted, losses), (found, others) = run(one, first), run(many, second)
    assert_close(wanted, found, losses, others, 3e-6 if dtype is None else 3e-2)
    np.testing.assert_allclose(
        found.model_state["mean"],
        wanted.model_state["mean"],
        atol=1e-2 if dtype else 1e-6,
    )
    assert found.model_state["mean"].sharding.spec == P("fsdp")
    assert int(found.model_state["seen"]) == int(wanted.model_state["seen"]) == 5


def shardings(state):
    return {
        jax.tree_util.keystr(path): (leaf.shape, leaf.dtype, leaf.sharding)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


def assert_placed(state, abstract):
    """Checks that every array lies where `abstract_state` says."""
    found, wanted = shardings(state), shardings(abstract)
    assert found.keys() == wanted.keys()
    for name, (shape, dtype, sharding) in found.items():
        assert (shape, dtype) == wanted[name][:2], name
        assert sharding.is_equivalent_to(wanted[name][2], len(shape)), name


STATEFUL = {
    "plain": {},
    "host executor": {"executor": "host", "all_reduce": collectives.two_shot(FEEDBACK)},
    "power_sgd": {
        "all_reduce": collectives.psum(
            codecs.error_feedback(codecs.power_sgd(2, jax.random.key(3)))
        )
    },
}


@pytest.mark.one_python
@pytest.mark.parametrize("name", some_of(STATEFUL, "host executor"))
def test_every_array_stays_with_its_shards(name):
    inner, mesh = ("fsdp", "tp"), mesh_of(2, ("fsdp", "tp"))
    train = pj.make_train_step(
        loss_fn, OPTIMIZERS["muon"], mesh=mesh, axis_name="host", **STATEFUL[name]
    )
    given = sharded(mesh, inner)
    abstract = train.abstract_state(given)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), given
    )
    assert shardings(train.abstract_state(shapes)) == shardings(abstract)
    state = train.init(given)
    assert_placed(state, abstract)
    for batch in batches(3):
        state, _ = train.step(state, train.batch(batch, axis_name=("host", "fsdp")))
        assert_placed(state, abstract)
    state, _ = train.drain(state)
    assert_placed(state, abstract)
    up = state.params["up"]
    assert {x.data.size for x in up.addressable_shards} == {up.size // 4}
    if name != "host executor":
        gradient = state.in_flight.pending[0].gradients["up"]
        assert {x.data.size for x in gradient.addressable_shards} == {up.size // 4}


SENT = {
    "psum": collectives.psum(),
    "two_shot(int8)": collectives.two_shot(codecs.int8(64)),
    "two_shot(stochastic)": collectives.two_shot(
        codecs.stochastic(codecs.int8(64), jax.random.key(1))
    ),
    "ring(top_k)": collectives.ring(codecs.error_feedback(codecs.top_k(0.25))),
    "power_sgd": collectives.psum(
        codecs.error_feedback(codecs.power_sgd(2, jax.random.key(3)))
    ),
    "tree": collectives.tree(FEEDBACK),
    "halving_doubling": collectives.halving_doubling(FEEDBACK),
    "parameter_server": collectives.parameter_server(FEEDBACK),
}


@pytest.mark.one_python
@pytest.mark.parametrize("name", some_of(SENT, "two_shot(int8)"))
def test_device_sends_its_shards_and_all_copies_stay_equal(name):
    """Devices with the same shards have the same bits, whatever a codec loses."""
    inner = ("half",)
    mesh = mesh_of(4, inner)
    train = pj.make_train_step(
        loss_fn,
        OPTIMIZERS["momentum"],
        mesh=mesh,
        axis_name="host",
        all_reduce=SENT[name],
        weight_prediction=False,
    )
    state = train.init(sharded(mesh, inner))
    batch = train.batch(batches(1)[0])
    compiled = inspect(train, state, batch).collectives
    between = sum(x.bytes * x.times for x in compiled if x.axes == ("host",))
    # Four devices take part in a collective between groups, and two in one inside.
    declared = train.transfers(state, batch)
    assert between == sum(x.bytes for x in declared if x.devices == 4)
    assert {x.devices for x in declared} <= {2, 4}
    state, _ = run(train, state, steps=4)
    digests = pj.replica_digest(state)
    by_place = np.array([digests[device.id] for device in mesh.devices.flat])
    assert [len(set(x)) for x in by_place.reshape(mesh.devices.shape).T] == [1, 1]
    # What is not split has the same bits on all devices.
    whole = {k: v for k, v in state.params.items() if k != "up"}
    assert len(set(pj.replica_digest(whole).values())) == 1


def test_int8_sends_a_quarter_of_the_bytes():
    """Eight bits take a quarter of the bytes of float32, beside the blocks' scales."""
    mesh = mesh_of(4, ("half",))

    def sent(all_reduce):
        train = pj.make_train_step(
            lambda params, batch: jnp.sum(params["up"] ** 2) * jnp.mean(batch["x"]),
            optax.sgd(0.1),
            mesh=mesh,
            axis_name="host",
            all_reduce=all_reduce,
        )
        place = NamedSharding(mesh, P("half"))
        up = jax.ShapeDtypeStruct((64, 1024), jnp.float32, sharding=place)
        state = train.abstract_state({"up": up})
        found = train.transfers(state, batches(1)[0])
        return sum(x.wire_bytes for x in found if x.devices == 4)

    whole = sent(collectives.psum())
    assert whole == pytest.approx(2 * 3 / 4 * 4 * 64 * 1024 / 2, rel=1e-3)
    assert sent(collectives.two_shot(codecs.int8())) == pytest.approx(
        whole / 4, rel=0.02
    )


def refused(message):
    return pytest.raises(ValueError, match=message)


def make(mesh, **options):
    return pj.make_train_step(
        loss_fn, optax.sgd(0.1), mesh=mesh, axis_name="host", **options
    )


def test_arrays_with_a_wrong_sharding_are_named():
    mesh = mesh_of(2, ("fsdp",))
    given = params()

    def placed(mesh, spec):
        return given | {"up": jax.device_put(given["up"], NamedSharding(mesh, spec))}

    rule = r"`params\['up'\]` must not be sharded over 'host', over which gradients"
    with refused(rule):
        make(mesh).init(placed(mesh, P(("host", "fsdp"))))
    other = mesh_of(2, ("tp",))
    with refused(r"`params\['up'\]` must be sharded over the mesh of the train step"):
        make(mesh).init(placed(other, P("tp")))
    with refused("`train.init` must not be traced on a mesh with inner axes"):
        jax.eval_shape(make(mesh).init, given)
    with refused(r"`axis_name` must begin with 'host', .* got \('fsdp', 'host'\)"):
        make(mesh).batch(batches(1)[0], axis_name=("fsdp", "host"))
    with refused("a positive multiple of its 4 shares of a batch"):
        make(mesh).batch(np.zeros((6, 2)), axis_name=("host", "fsdp"))


def test_copies_differing_between_groups_are_refused():
    """JAX takes the copies of one array to be the same, and uses any of them."""
    mesh, given = mesh_of(2, ("fsdp",)), params()
    sharding = NamedSharding(mesh, P("fsdp"))
    parts = [
        jax.device_put(given["up"][index] + group, device)
        for (group, _), device in np.ndenumerate(mesh.devices)
        for index in [sharding.devices_indices_map(given["up"].shape)[device]]
    ]
    shape = given["up"].shape
    up = jax.make_array_from_single_device_arrays(shape, sharding, parts)
    with refused(r"`params\['up'\]` must be the same in every group, along 'host'"):
        make(mesh).init(given | {"up": up})


@pytest.mark.one_python
def test_unused_axis_is_reported_once():
    mesh = mesh_of(2, ("fsdp",))
    train, (first, second) = make(mesh), batches(2)
    state = train.init(params())
    with pytest.warns(UserWarning, match="nothing is split over the mesh axis 'fsdp'"):
        state, _ = train.step(state, first)
    state, _ = train.step(state, second)  # warnings are errors here

    def by_itself(params, batch):
        x = jax.lax.with_sharding_constraint(batch["x"], P("fsdp"))
        return loss_fn(params, batch | {"x": x})

    train = pj.make_train_step(by_itself, optax.sgd(0.1), mesh=mesh, axis_name="host")
    train.step(train.init(params()), first)
    train = make(mesh)
    split = train.batch(first, axis_name=("host", "fsdp"))
    train.step(train.init(params()), split)
