"""Tests what a local step is given: metrics, weights, keys, and bad batches."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pipejax as pj

from ..grid import grid
from ..helpers import assert_bits_equal, batches, init_params, loss_fn
from .refusals import refused


def new(loss, tx=None, **settings):
    settings = {"mesh": pj.data_mesh(4), "sync_every": 2, "overlap_steps": 1} | settings
    return pj.make_local_step(loss, tx or optax.adamw(1e-2), **settings)


# Tests share local steps, and with them traced programs.
made = functools.cache(new)


def test_metrics_and_weights_of_a_round_are_means():
    def full(params, batch):
        weight = jnp.abs(batch["x"]).sum()
        return loss_fn(params, batch), pj.Aux({"seen": weight}, weight=weight)

    data = batches(4)
    train = made(full)
    state, infos = train.init(init_params(), batch=data[0]), []
    for batch in data:
        state, info = train.step(state, batch)
        infos.append(info)
    shares = [np.abs(batch["x"]).reshape(4, -1).sum(1) for batch in data[1:3]]
    weights = np.stack(shares)
    np.testing.assert_allclose(infos[3].weight, weights.sum() / 2, rtol=1e-5)
    seen = (weights**2).sum() / weights.sum()
    np.testing.assert_allclose(infos[3].metrics["seen"], seen, rtol=1e-5)
    own = np.stack([info.local_loss for info in infos[1:3]])
    mean = (own * weights).sum() / weights.sum()
    np.testing.assert_allclose(infos[3].loss, mean, rtol=1e-5)


def test_groups_get_keys_of_their_own():
    def noisy(params, batch, *, rng):
        return loss_fn(params, batch) + jax.random.normal(rng), pj.Aux()

    train = made(noisy)
    state = train.init(init_params(), rng=jax.random.key(0))
    same = {"x": np.ones((16, 5), np.float32), "y": np.ones((16, 3), np.float32)}
    state, first = train.step(state, same)
    _, second = train.step(state, same)
    assert len({*first.local_loss.tolist(), *second.local_loss.tolist()}) == 8


def distilled(params, batch, *, shared):
    return loss_fn(params, batch) * shared["scale"] + shared["shift"].sum()


def test_all_groups_get_shared_inputs():
    data, shift = batches(4), np.arange(3, dtype=np.float32)
    train, plain = made(distilled), made(loss_fn)
    state, wanted = train.init(init_params()), plain.init(init_params())
    for batch in data:
        shared = {"scale": 1.0, "shift": shift}
        state, info = train.step(state, batch, shared)
        wanted, other = plain.step(wanted, batch)
        np.testing.assert_allclose(info.local_loss, other.local_loss + 3, rtol=1e-5)
    chex.assert_trees_all_close(state.params, wanted.params, rtol=1e-4, atol=1e-6)


def test_shared_array_of_a_donated_state_is_refused():
    train = made(distilled, donate=True)
    state = train.init(init_params())
    shared = {"scale": 1.0, "shift": state.local.trainable.params["bias"]}
    with pytest.raises(ValueError, match="`shared` must hold no array of a state"):
        train.step(state, batches(1)[0], shared)


def test_batch_of_another_number_of_groups_is_refused():
    train = made(loss_fn)
    with pytest.raises(ValueError, match="batch"):
        train.step(train.init(init_params()), batches(1, size=10)[0])


def test_report_without_its_batch_is_refused():
    def full(params, batch):
        return loss_fn(params, batch), pj.Aux({"seen": jnp.float32(1)})

    train = made(full)
    with pytest.raises(ValueError, match=r"`batch` must be given to `train.init`"):
        train.step(train.init(init_params()), batches(1)[0])


def test_parameters_on_one_device_are_taken():
    train = made(loss_fn)
    params = jax.device_put(init_params(), jax.devices()[1])
    state, _ = train.step(train.init(params), batches(1)[0])
    assert len(state.params["hidden"].sharding.device_set) == 4


def test_groups_continue_from_a_synchronous_warm_up():
    tx, data = optax.adamw(1e-2), batches(9)
    warm = pj.make_train_step(loss_fn, tx, mesh=pj.data_mesh(4), width=1)
    begun = warm.init(init_params())
    for batch in data[:3]:
        begun, _ = warm.step(begun, batch)
    train = made(loss_fn, sync_every=1, overlap_steps=0)
    state = train.init(begun.params, opt_state=begun.opt_state)
    local = state.local.trainable.opt_state[0]
    assert local.count.tolist() == [3] * 4
    for group in local.mu["out"]:
        assert np.array_equal(group, begun.opt_state[0].mu["out"])
    for batch in data[3:]:
        state, _ = train.step(state, batch)
    assert state.local.trainable.opt_state[0].count.tolist() == [9] * 4


def test_state_of_another_optimizer_is_refused():
    train = made(loss_fn)
    other = optax.sgd(0.1, momentum=0.9).init(init_params())
    with pytest.raises(ValueError, match="`opt_state` must be a state of this"):
        train.init(init_params(), opt_state=other)


def test_round_without_weight_moves_the_anchor_and_its_residual():

    def weighted(params, batch):
        return loss_fn(params, batch), pj.Aux(weight=batch["x"][0, 0])

    data = batches(8)
    for i, batch in enumerate(data):
        batch["x"][:, 0] = i < 4
    codec = pj.codecs.error_feedback(pj.codecs.int4(8))
    all_reduce = pj.collectives.two_shot(codec)
    train = made(weighted, sync_every=2, overlap_steps=2, all_reduce=all_reduce)
    state = train.init(init_params(), batch=data[0])
    for batch in data:
        before = state
        state, info = train.step(state, batch)
    assert (info.arrived, info.weight) == (False, 0)
    assert np.isnan(info.loss)
    pairs = zip(state.shared.anchor, before.shared.anchor, strict=True)
    moved = [bool((a["float32"] != b["float32"]).any()) for a, b in pairs]
    states = zip(state.own.codec_states, before.own.codec_states, strict=True)
    fed = [
        any((a != b).any() for a, b in zip(*map(jax.tree.leaves, pair), strict=True))
        for pair in states
    ]
    assert moved == fed == [False, True]


@pytest.mark.parametrize("executor", ["fused", "host"])
def test_drain_leaves_residuals_for_later_rounds(executor):
    """The sent element in turn is the first or the second, so neither lags by two."""
    slope = jnp.float32([3, 2, 3, 2])  # each device sums two elements
    codec = pj.codecs.error_feedback(pj.codecs.top_k(1))
    train = new(
        lambda w, x: (w * slope).sum() + 0 * x.mean(),
        mesh=pj.data_mesh(2),
        tx=optax.sgd(1.0),
        sync_every=1,
        all_reduce=pj.collectives.two_shot(codec),
        executor=executor,
    )
    assert train.executor.name == executor
    state = train.init(jnp.zeros(4))
    for _ in range(4):
        state, _ = train.step(state, jnp.zeros(4))
        state, _ = train.drain(state)
    np.testing.assert_array_equal(state.params, [-9, -8, -9, -8])


def test_state_of_another_kind_is_refused():
    train = made(loss_fn)
    plain = pj.make_train_step(loss_fn, optax.adamw(1e-2), mesh=pj.data_mesh(4))
    state = plain.init(init_params())
    (batch,) = batches(1)
    for call in (
        lambda: train.step(state, batch),
        lambda: train.drain(state),
        lambda: train.lower(state, batch),
        lambda: train.transfers(state, batch),
    ):
        with pytest.raises(ValueError, match=r"`state` must be the pj.LocalState"):
            call()


@pytest.mark.parametrize("executor", ["fused", "host"])
def test_local_step_says_its_axis_and_compiler_options(executor):
    train = made(loss_fn, executor=executor)
    assert (train.axis_name, train.compiler_options) == ("data", {})


def test_state_of_other_inner_axes_is_refused():
    def of(name):
        mesh = pj.data_mesh(4, axis_name=("host", name), hosts=2)
        return made(loss_fn, mesh=mesh, axis_name="host")

    state = of("device").init(init_params())
    with pytest.raises(ValueError, match=r"\('fsdp',\) inner axes; got .*'device'"):
        of("fsdp").step(state, batches(1)[0])


def test_donated_state_is_refused_and_has_no_parameters():
    train = made(loss_fn, donate=True, sync_every=1)
    state, _ = train.step(train.init(init_params()), batches(1)[0])
    assert state.params["bias"].shape == (7,)
    train.step(state, batches(1)[0])
    with pytest.raises(ValueError, match="`state` must not have been donated"):
        train.step(state, batches(1)[0])
    with pytest.raises(ValueError, match="`state` must not have been donated"):
        assert state.params


@pytest.mark.parametrize("settings", [{}, {"executor": "host"}, {"warmup_steps": 1}])
def test_traced_local_steps_are_refused(settings):
    train, (batch,) = made(loss_fn, **settings), batches(1)
    state = train.init(init_params())
    message = "`state` of local steps must not be used inside jit, scan or eval_shape"
    for call in (
        lambda: jax.jit(train.step)(state, batch),
        lambda: jax.eval_shape(functools.partial(train.step, state), batch),
        lambda: jax.lax.scan(lambda s, _: train.step(s, batch), state, length=2),
        lambda: jax.jit(train.drain)(state),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("axes", [("data",), ("data", "fsdp")])
def test_params_have_the_axis_types_of_the_mesh(axes):
    def with_state(params, batch, *, model_state):
        mean = 0.9 * model_state + 0.1 * batch["x"].mean()
        return loss_fn(params, batch), pj.Aux(model_state=mean)

    sizes, kinds = (2,) * len(axes), (AxisType.Explicit,) * len(axes)
    devices = jax.devices()[: 2 ** len(axes)]
    mesh = jax.make_mesh(sizes, axes, axis_types=kinds, devices=devices)
    train = made(with_state, mesh=mesh)
    state = train.init(init_params(), model_state=jnp.float32(0))
    for batch in batches(4):
        state, _ = train.step(state, train.batch(batch, axis_name=axes))
    with jax.set_mesh(mesh):
        placed = jax.device_put(batch, NamedSharding(mesh, P()))
        loss = with_state(state.params, placed, model_state=state.model_state)[0]
    assert np.isfinite(loss)
    twin = made(with_state, mesh=pj.data_mesh(2))
    wanted = twin.init(init_params(), model_state=jnp.float32(0))
    for batch in batches(4):
        wanted, _ = twin.step(wanted, batch)
    ends = jax.device_get([(x.params, x.model_state) for x in (state, wanted)])
    chex.assert_trees_all_close(*ends, rtol=1e-5, atol=1e-6)


def test_params_are_read_under_any_mesh():
    mesh = pj.data_mesh(4, axis_name=("host", "fsdp"), hosts=2)
    for train in (made(loss_fn), made(loss_fn, mesh=mesh, axis_name="host")):
        state = train.init(init_params())
        with jax.set_mesh(jax.make_mesh((8,), ("data",))):
            assert np.array_equal(state.params["out"], init_params()["out"])


CODECS = {
    "rotated": pj.codecs.rotated(pj.codecs.int4(8), jax.random.key(0), block=64),
    "sign": pj.codecs.error_feedback(pj.codecs.sign(8)),
    "int2": pj.codecs.error_feedback(pj.codecs.int2(8)),
    "quantize": pj.codecs.error_feedback(pj.codecs.quantize(8)),
    "int8": pj.codecs.error_feedback(pj.codecs.int8(8)),
}


FREEZES = {
    "alone": lambda tx: tx,
    "clipped before": lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
    "accumulated": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
}


@grid(1, codec=CODECS, executor=["fused", "host"], overlap=[2, 0], how=FREEZES)
def test_frozen_parameters_keep_their_bits(codec, executor, overlap, how):
    """Some codecs decode zeros to something else, above all beside other elements."""
    labels = {"hidden": "freeze", "bias": "train", "out": "train"}
    kinds = {"train": optax.adamw(1e-2), "freeze": optax.set_to_zero()}
    train = new(
        loss_fn,
        FREEZES[how](optax.partition(kinds, labels)),
        sync_every=2,
        overlap_steps=overlap,
        executor=executor,
        all_reduce=pj.collectives.two_shot(CODECS[codec]),
    )
    state = train.init(init_params())
    for batch in batches(6):
        state, _ = train.step(state, batch)
    state, _ = train.drain(state)
    assert_bits_equal(state.params["hidden"], init_params()["hidden"])
    own = np.asarray(state.local.trainable.params["hidden"])
    assert_bits_equal(own, np.stack([init_params()["hidden"]] * 4))
    assert not np.array_equal(state.params["out"], init_params()["out"])


MASK = np.where(np.arange(7) < 5, 0, -np.inf).astype(np.float32)


def masked_loss(params, batch):
    mask = jax.lax.stop_gradient(params.get("mask", MASK))
    return loss_fn(params | {"bias": params["bias"] * jnp.exp(mask)}, batch)


@grid(1, overlap=[2, 0], executor=["fused", "host"], freezes=[True, False])
def test_infinite_parameters_are_no_change(overlap, executor, freezes):
    """Minus infinity minus itself is NaN."""

    def trained(tx, params):
        settings = {"overlap_steps": overlap, "executor": executor}
        train = made(masked_loss, tx, sync_every=2, **settings)
        state = train.init(params)
        for batch in batches(5):
            state, _ = train.step(state, batch)
        state, _ = train.drain(state)
        assert state.shared.refused == 0
        return dict(state.params)

    tx, params = optax.sgd(0.1), init_params()
    wanted = trained(tx, params)
    if freezes:
        labels = dict.fromkeys(params, "train") | {"mask": "freeze"}
        kinds = {"train": tx, "freeze": optax.set_to_zero()}
        tx = optax.partition(kinds, labels)
    found = trained(tx, params | {"mask": MASK})
    assert_bits_equal(found.pop("mask"), MASK)
    assert_bits_equal(found, wanted)


@pytest.mark.parametrize("overlap", [2, pytest.param(1, marks=pytest.mark.full)])
def test_outer_update_of_nothing_but_zeros_stays_in_its_chunk(overlap):
    """Without an epsilon, Adam divides 0 by 0 in the zeros that fill a chunk."""
    outer = optax.adam(0.01, eps=0.0)
    settings = {"sync_every": 2, "overlap_steps": overlap}
    train = new(loss_fn, optax.sgd(0.1), outer_tx=outer, **settings)
    state = train.init(init_params())
    for batch in batches(9):
        state, _ = train.step(state, batch)
    state, _ = train.drain(state)
    assert state.shared.refused == 0
    for name, first in init_params().items():
        assert np.abs(state.params[name] - first).min() > 0


def test_parameter_moved_without_a_gradient_is_exchanged():
    labels = {"hidden": "decay", "bias": "train", "out": "train"}
    decay = optax.chain(optax.set_to_zero(), optax.add_decayed_weights(-0.125))
    tx = optax.partition({"train": optax.sgd(0.1), "decay": decay}, labels)
    train = new(loss_fn, tx, sync_every=2, overlap_steps=2)
    state = train.init(init_params())
    for batch in batches(5):
        state, _ = train.step(state, batch)
    state, _ = train.drain(state)
    wanted = 0.875**5 * init_params()["hidden"]
    np.testing.assert_allclose(state.params["hidden"], wanted, rtol=1e-5)


def test_constant_model_state_needs_a_batch():
    """An infinite constant would make every change of the round NaN."""

    def loss(params, batch, *, model_state):
        masked = loss_fn(params, batch) + 0 * jnp.exp(model_state["mask"]).sum()
        return masked, pj.Aux(model_state=model_state)

    data, mask = batches(3), {"mask": jnp.full(2, -jnp.inf)}
    train = new(loss)
    like = train.abstract_state(init_params(), model_state=mask)
    with refused(r"`batch` must show .*returns unchanged `model_state\['mask'\]`"):
        train.step(
            train.init(init_params(), model_state={"mask": jnp.zeros(2)}), data[0]
        )
    assert like.model_state["mask"].shape == (2,)
    state = train.init(init_params(), model_state=mask, batch=data[0])
    for batch in data:
        state, info = train.step(state, batch)
    assert info.refused == 0


def test_sam_is_refused():
    sam = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05), sync_period=2)
    with refused("`tx` must not hold optax.contrib.sam in local steps"):
        new(loss_fn, sam).init(init_params())


@pytest.mark.parametrize("executor", ["fused", "host"])
@pytest.mark.parametrize("warmup", [0, 1])
def test_change_of_model_state_without_a_place_is_refused(executor, warmup):
    """Otherwise each group would keep its own, as if all agreed."""

    def loss(w, batch, *, model_state):
        mean = model_state["mean"]
        if "y" in batch:
            mean = 0.9 * mean + 0.1 * batch["y"].mean()
        return jnp.mean((w - batch["x"]) ** 2), pj.Aux(model_state={"mean": mean})

    train = new(loss, executor=executor, warmup_steps=warmup)
    frozen, moves = {"x": np.ones(4, "f4")}, {"x": np.ones(4, "f4"), "y": np.ones(4)}
    given = {"model_state": {"mean": jnp.float32(0)}, "batch": frozen}
    state, _ = train.step(train.init(jnp.float32(0), **given), frozen)
    with refused(r"`batch` must show .*changes `model_state\['mean'\]`, and the state"):
        train.step(state, moves)


@pytest.mark.parametrize("copy", [jnp.copy, jax.device_get])
def test_copy_of_a_donated_state_goes_on(copy):
    train = new(lambda w, batch: jnp.mean((w - batch) ** 2), donate=True)
    state, batch = train.init(jnp.float32(0)), np.ones(4, np.float32)
    for _ in range(3):
        state, _ = train.step(state, batch)
        kept = jax.tree.map(copy, state)
        drained, _ = train.drain(kept)
        assert float(drained.params) > 0
