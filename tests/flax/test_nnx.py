"""Tests an NNX model with batch norm and dropout: split, trained, updated in place."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import pipejax as pj
import pipejax.flax.nnx

from ..grid import grid
from ..helpers import assert_bits_equal
from . import twin
from .test_linen import CHANCE, TX, batch_at, raw, run


class Model(nnx.Module):
    def __init__(self, *, rngs):
        self.hidden = nnx.List([nnx.Linear(5, 16, rngs=rngs)])
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.out = nnx.Linear(16, 3, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(nnx.relu(self.norm(self.hidden[0](x)))))


def loss_fn(model, batch):
    logits = model(batch["x"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
    return loss, {"accuracy": (logits.argmax(-1) == batch["y"]).mean()}


def fresh():
    return Model(rngs=nnx.Rngs(params=0, dropout=1))


def start(model, rng=None, devices=4):
    pure_loss_fn, params, model_state = pj.flax.nnx.split(model, loss_fn)
    train = pj.make_train_step(pure_loss_fn, TX, mesh=pj.data_mesh(devices), width=2)
    state = train.init(params, model_state=model_state, rng=rng, batch=batch_at(0))
    return train, state


def values(model):
    return nnx.to_pure_dict(nnx.state(model))


def test_model_is_trained_and_updated_in_place():
    model = fresh()
    train, state = start(model, jax.random.key(2))
    state, losses = run(train, state)
    assert np.isnan(losses[0]), "nothing arrives in the first step of width 2"
    assert losses[1] > 0.8 * CHANCE
    assert np.mean(losses[-5:]) < 0.5 * CHANCE
    assert_bits_equal(raw(values(model)), raw(values(fresh())))

    state, _ = train.drain(state)
    kernel = model.out.kernel
    pj.flax.nnx.update(model, state)
    assert model.out.kernel is kernel, "updated in place"
    assert_bits_equal(model.out.kernel[...], state.params["out"]["kernel"])
    assert_bits_equal(model.norm.mean[...], state.model_state["norm"]["mean"])
    model.eval()
    test = batch_at(10_000, size=512)
    hits = np.asarray(model(test["x"])).argmax(-1) == test["y"]
    assert hits.mean() > 0.75


def cross_entropy(logits, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return losses.mean()


class CalledWith(Model):
    """A model whose dropout draws from the streams that it is called with."""

    def __init__(self, *, rngs):
        super().__init__(rngs=rngs)
        self.dropout = nnx.Dropout(0.2)

    def __call__(self, x, rngs=None):
        x = nnx.relu(self.norm(self.hidden[0](x)))
        return self.out(self.dropout(x, rngs=rngs))


class Both(CalledWith):
    """A model that draws from its own stream and from those that it is called with."""

    def __init__(self, *, rngs):
        super().__init__(rngs=rngs)
        self.first = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x, rngs=None):
        return super().__call__(self.first(x), rngs=rngs)


def stream(key):
    """Returns a stream that begins with the first draw of another, as NNX reseeds."""
    key = jax.random.fold_in(jax.random.fold_in(key, 0), 0)
    return {"key": key, "count": jnp.zeros((), jnp.uint32)}


def called_by_hand(kind):
    """Returns the loss of one device by merge and split, and its arguments."""
    model = kind(rngs=nnx.Rngs(params=0, dropout=1))
    graph, params, _, stats = nnx.split(model, nnx.Param, nnx.RngState, ...)

    def loss_fn(params, stats, batch, key):
        name = {Model: "dropout", Both: "first"}.get(kind)
        streams = {name: {"rngs": stream(key)}} if name else {}
        model = nnx.merge(graph, params, streams, stats)
        rngs = nnx.Rngs(key)
        if kind is Both:
            rngs()  # the model's own stream begins with this draw
        given = {} if kind is Model else {"rngs": rngs}
        loss = cross_entropy(model(batch["x"], **given), batch)
        stats = nnx.state(model, nnx.BatchStat)
        return loss, nnx.to_pure_dict(stats)

    return loss_fn, nnx.to_pure_dict(params), nnx.to_pure_dict(stats)


LOSSES = {
    Model: lambda model, batch: cross_entropy(model(batch["x"]), batch),
    CalledWith: lambda model, batch, rngs: cross_entropy(
        model(batch["x"], rngs=rngs), batch
    ),
    Both: lambda model, batch, *, rngs: cross_entropy(
        model(batch["x"], rngs=rngs), batch
    ),
}


@grid(1, kind=LOSSES, devices=[1, 4], width=[1, 2])
def test_nnx_training_equals_a_loop_by_hand(kind, devices, width):
    """Batch norm agrees, and so does dropout by streams of the model or the call."""
    tx, key = optax.sgd(0.1, momentum=0.9), jax.random.key(2)
    model = kind(rngs=nnx.Rngs(params=0, dropout=1))
    loss, params, model_state = pj.flax.nnx.split(model, LOSSES[kind])
    train = pj.make_train_step(loss, tx, mesh=pj.data_mesh(devices), width=width)
    state = train.init(params, model_state=model_state, rng=key)
    state, _ = train.drain(run(train, state, 5)[0])
    by_hand, params, stats = called_by_hand(kind)
    data = [batch_at(step) for step in range(5)]
    expected = twin.pipe_sgd(
        by_hand, tx, params, stats, key, data, devices=devices, width=width
    )
    got = state.params, {"norm": state.model_state["norm"]}
    # The bound on rounding is that of test_linen.
    eps = np.finfo(np.float32).eps
    chex.assert_trees_all_close(got, expected, rtol=0, atol=10 * eps)


class Noise(nnx.Module):
    """A model whose loss is the mean of the draws of its two random streams."""

    def __init__(self, *, rngs):
        self.scale = nnx.Param(jnp.ones(()))
        self.rngs = rngs

    def __call__(self, x):
        return self.scale * (self.rngs.a.normal(x.shape) + self.rngs.b.normal(x.shape))


def draws(rng, steps=3, devices=4):
    """Returns each device's draw in each step, [steps, devices], and the last state."""
    model = Noise(rngs=nnx.Rngs(a=0, b=1))

    def noise(model, batch):
        drawn = model(batch).mean()
        # A device writes only its own place, so that the mean over devices keeps all
        # draws.
        here = jnp.arange(devices) == jax.lax.axis_index("data")
        return drawn, list(jnp.where(here, drawn, 0.0) * devices)

    loss, params, model_state = pj.flax.nnx.split(model, noise)
    train = pj.make_train_step(
        loss, optax.sgd(0.0), mesh=pj.data_mesh(devices), width=1
    )
    batch = np.zeros((devices, 2), np.float32)
    state = train.init(params, model_state=model_state, rng=rng, batch=batch)
    out = []
    for _ in range(steps):
        state, info = train.step(state, batch)
        out.append(np.asarray(info.metrics))
    return np.stack(out), state, model_state


def test_every_device_and_step_draws_with_its_own_key():
    drawn, state, given = draws(jax.random.key(3))
    assert len(np.unique(drawn)) == drawn.size
    np.testing.assert_array_equal(drawn, draws(jax.random.key(3))[0])
    assert not np.isin(drawn, draws(jax.random.key(4))[0]).any()
    assert_bits_equal(raw(state.model_state), raw(given))
    assert len(set(pj.replica_digest(state).values())) == 1


def test_streams_use_the_keys_of_their_names():
    """A stream without a key draws from the default key, as in `nnx.Rngs`."""
    key, other = jax.random.key(3), jax.random.key(4)
    single = draws(key)[0]
    np.testing.assert_array_equal(draws({"default": key})[0], single)
    named = draws({"a": key, "b": other})[0]
    assert not np.isin(named, single).any()
    np.testing.assert_array_equal(named, draws({"b": other, "a": key})[0])
    message = r"`rng` must have a key for each .* got none for \['b'\]. .* add `'b'"
    with pytest.raises(ValueError, match=message):
        draws({"a": key})
    with pytest.raises(ValueError, match="`rng` must be a PRNG key or a dict of keys"):
        draws([key])


def test_frozen_variables_are_not_sent():
    """Only the adapter and the statistics that change travel, not the base model."""

    class Adapted(nnx.Module):
        def __init__(self, *, rngs):
            self.base = nnx.Linear(8, 8, rngs=rngs)
            self.adapter = nnx.LoRA(8, 2, 8, rngs=rngs)
            self.norm = nnx.BatchNorm(8, rngs=rngs)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)

        def __call__(self, x):
            return self.dropout(self.norm(self.base(x) + self.adapter(x)))

    loss, params, model_state = pj.flax.nnx.split(
        Adapted(rngs=nnx.Rngs(0)),
        lambda model, batch: jnp.mean(model(batch) ** 2),
        wrt=nnx.LoRAParam,
    )
    train, batch = pj.make_train_step(loss, TX, mesh=pj.data_mesh(2)), np.ones((4, 8))
    state = train.init(
        params, model_state=model_state, rng=jax.random.key(0), batch=batch
    )
    for _ in range(2):
        state, _ = train.step(state, batch)
        leaves = jax.tree_util.tree_leaves_with_path(state.in_flight.pending[0].changes)
        sent = {jax.tree_util.keystr(path) for path, _ in leaves}
        assert sent == {"['norm']['mean']", "['norm']['var']"}
    assert_bits_equal(state.model_state["base"], model_state["base"])


def test_random_numbers_without_a_key_are_refused():
    message = r"`rng` must be given to `train.init`, because `loss_fn` {}.*; got None\."
    with pytest.raises(ValueError, match=message.format("draws from the random strea")):
        draws(None)
    loss, params, model_state = pj.flax.nnx.split(
        CalledWith(rngs=nnx.Rngs(0)), LOSSES[CalledWith]
    )
    train = pj.make_train_step(loss, TX, mesh=pj.data_mesh(2))
    with pytest.raises(ValueError, match=message.format("takes `rngs`")):
        train.init(params, model_state=model_state, batch=batch_at(0))
    # Streams that are not drawn from need no key.
    model = fresh()
    model.eval()
    train, state = start(model)
    train.step(state, batch_at(0))


def test_random_numbers_from_outside_of_the_loss_are_refused():
    rngs = nnx.Rngs(0)

    def loss(model, batch):
        return cross_entropy(model(batch["x"], rngs=rngs), batch)

    loss, params, model_state = pj.flax.nnx.split(CalledWith(rngs=rngs), loss)
    train = pj.make_train_step(loss, TX, mesh=pj.data_mesh(2))
    message = (
        r"`loss_fn` must not change an object that it is not passed, .* Cannot mutate"
        r" RngCount .*`loss_fn\(model, batch, rngs\)`, and give `train.init` an `rng`"
    )
    with pytest.raises(ValueError, match=message):
        train.init(params, model_state=model_state, batch=batch_at(0))


@pytest.mark.parametrize("rng", [None, jax.random.key(0)])
def test_model_without_state_is_trained(rng):
    model = nnx.Linear(5, 1, rngs=nnx.Rngs(0))
    loss, params, model_state = pj.flax.nnx.split(
        model, lambda model, batch: jnp.mean(model(batch["x"]) ** 2)
    )
    assert model_state == {}
    train = pj.make_train_step(loss, TX, mesh=pj.data_mesh(4), width=1)
    state, _ = train.step(
        train.init(params, model_state=model_state, rng=rng), batch_at(0)
    )
    pj.flax.nnx.update(model, state)
    assert_bits_equal(model.kernel[...], state.params["kernel"])


def test_streams_of_layers_stacked_by_vmap_are_kept():
    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def stack(rngs):
        return nnx.Dropout(0.5, rngs=rngs)

    class Stacked(nnx.Module):
        def __init__(self, *, rngs):
            self.scale = nnx.Param(jnp.ones(()))
            self.layers = stack(rngs)

        def __call__(self, x):
            return nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(
                self.layers, x * self.scale
            )

    loss, params, model_state = pj.flax.nnx.split(
        Stacked(rngs=nnx.Rngs(0)), lambda model, batch: model(batch["x"]).mean()
    )
    train = pj.make_train_step(loss, TX, mesh=pj.data_mesh(2), width=1)
    state = train.init(params, model_state=model_state, rng=jax.random.key(0))
    after, info = train.step(state, batch_at(0))
    assert np.isfinite(info.loss)
    assert_bits_equal(raw(after.model_state), raw(model_state))


def trained_by_hand(model, loss_fn, tx, steps, wrt=nnx.Param):
    """Trains a model on one device with the loop of an NNX user."""
    optimizer = nnx.Optimizer(model, tx, wrt=wrt)

    @nnx.jit
    def step(model, optimizer, batch):
        grads = nnx.grad(loss_fn, argnums=nnx.DiffState(0, wrt))(model, batch)
        optimizer.update(model, grads)

    for number in range(steps):
        step(model, optimizer, batch_at(number))
    return optimizer


def trained(model, loss_fn, tx, steps, devices=1, first=0, **options):
    """Trains a model as `trained_by_hand` does, but with a train step."""
    opt_state = options.pop("opt_state", None)
    loss, params, model_state = pj.flax.nnx.split(model, loss_fn, **options)
    train = pj.make_train_step(loss, tx, mesh=pj.data_mesh(devices), width=1)
    state = train.init(
        params, model_state=model_state, opt_state=opt_state, batch=batch_at(first)
    )
    for number in range(first, steps):
        state, _ = train.step(state, batch_at(number))
    pj.flax.nnx.update(model, state)
    return state


class Calls(nnx.Variable):
    pass


class Zoo(nnx.Module):
    """A model with tied layers, more than ten layers, a tuple and other variables."""

    def __init__(self, *, rngs):
        self.layers = nnx.List([nnx.Linear(5, 5, rngs=rngs) for _ in range(11)])
        self.tied = self.layers[3]
        self.scales = nnx.Param((jnp.ones((1, 5)), jnp.full((1, 5), 0.5)))
        self.norm = nnx.BatchNorm(5, rngs=rngs)
        self.out = nnx.Sequential(nnx.Linear(5, 3, rngs=rngs), jnp.tanh)
        self.calls = Calls(jnp.zeros((), jnp.int32))
        self.mask = nnx.Variable(jnp.array([[0.0, 0.0, 0.0, 0.0, -jnp.inf]]))

    def __call__(self, x):
        self.calls[...] += 1
        for layer in self.layers:
            x = x + jnp.tanh(layer(x))
        one, other = self.scales.get_value()
        x = self.norm(one * self.tied(x) + other)
        return self.out(jnp.maximum(x + self.mask[...], -9.0))


def zoo_loss(model, batch):
    return cross_entropy(model(batch["x"]), batch)


def test_model_with_many_kinds_of_variables_is_trained():
    """On one device, the result is that of a loop by hand, up to the order of sums."""
    tx = optax.sgd(0.1)
    expected, model = (Zoo(rngs=nnx.Rngs(0)) for _ in range(2))
    trained_by_hand(expected, zoo_loss, tx, 4)
    state = trained(model, zoo_loss, tx, 4)
    assert int(model.calls[...]) == 4
    assert int(state.skipped) == 0
    assert model.tied is model.layers[3]
    # Twelve layers add terms below 1 in another order, four times.
    atol = 4 * 12 * np.finfo(np.float32).eps
    chex.assert_trees_all_close(values(model), values(expected), rtol=0, atol=atol)
    assert not np.array_equal(
        model.tied.kernel[...], Zoo(rngs=nnx.Rngs(0)).tied.kernel[...]
    )


def test_shared_input_reaches_the_loss():
    """The teacher is another model, given by its arrays."""
    teacher, (batch,) = nnx.Linear(5, 3, rngs=nnx.Rngs(4)), [batch_at(0)]
    graph, known = nnx.split(teacher)

    def loss(model, batch, *, shared):
        return jnp.mean((model(batch["x"]) - nnx.merge(graph, shared)(batch["x"])) ** 2)

    model = nnx.Linear(5, 3, rngs=nnx.Rngs(0))
    pure, params, model_state = pj.flax.nnx.split(model, loss)
    tx = optax.sgd(0.1)
    train = pj.make_train_step(pure, tx, mesh=pj.data_mesh(2), width=1)
    state = train.init(params, model_state=model_state, batch=batch, shared=known)
    state, _ = train.step(state, batch, known)
    wanted, gradients = (
        nnx.state(model),
        nnx.grad(lambda model: loss(model, batch, shared=known))(model),
    )
    wanted = jax.tree.map(lambda w, g: w - 0.1 * g, wanted, gradients)
    pj.flax.nnx.update(model, state)
    chex.assert_trees_all_close(raw(values(model)), nnx.to_pure_dict(wanted), rtol=1e-5)


def test_shared_input_is_refused_by_a_loss_without_the_keyword():
    train, state = start(fresh(), jax.random.key(2))
    with pytest.raises(ValueError, match=r"keyword `shared`, which `train.step` was"):
        train.step(state, batch_at(0), 1.0)


def test_frozen_base_weights_stay_while_adapters_are_trained():
    """Trains low-rank adapters beside frozen weights, as `nnx.Optimizer` does."""

    def fresh():
        model = nnx.LoRALinear(5, 3, lora_rank=2, rngs=nnx.Rngs(0))
        model.lora.lora_b[...] = jnp.ones((2, 3))
        return model

    tx, start = optax.sgd(0.1), fresh()
    expected, model = fresh(), fresh()
    trained_by_hand(expected, zoo_loss, tx, 3, wrt=nnx.LoRAParam)
    state = trained(model, zoo_loss, tx, 3, devices=2, wrt=nnx.LoRAParam)
    assert set(state.params) == {"lora"}
    assert_bits_equal(model.kernel[...], start.kernel[...])
    assert not np.array_equal(model.lora.lora_a[...], start.lora.lora_a[...])
    # Three gradients are means over 64 examples in halves: 7 roundings of terms below
    # 4.
    atol = 3 * 0.1 * 7 * 4 * np.finfo(np.float32).eps
    chex.assert_trees_all_close(values(model), values(expected), rtol=0, atol=atol)


def test_training_continues_from_an_nnx_optimizer():
    """NNX numbers the eleven layers; sorting their names as text would mix them up."""

    def fresh():
        rngs = nnx.Rngs(0)
        layers = [nnx.Linear(5, 5, rngs=rngs) for _ in range(11)]
        return nnx.Sequential(*layers)

    tx = optax.sgd(0.05, momentum=0.9)
    whole, model = fresh(), fresh()
    trained_by_hand(whole, zoo_loss, tx, 5)
    optimizer = trained_by_hand(model, zoo_loss, tx, 2)
    opt_state = pj.flax.nnx.opt_state(optimizer)
    trained(model, zoo_loss, tx, 5, first=2, opt_state=opt_state)
    # The bound counts as above. Momentum multiplies the learning rate of 0.05 by at
    # most 10.
    atol = 3 * 11 * np.finfo(np.float32).eps
    chex.assert_trees_all_close(values(model), values(whole), rtol=0, atol=atol)
    with pytest.raises(ValueError, match="`opt_state` must be a state of this train s"):
        trained(model, zoo_loss, tx, 5, opt_state=optimizer.opt_state)


def test_weighted_loss_is_averaged_over_all_devices():
    """The mean over weighted examples is also taken over all devices."""
    weights = np.r_[np.ones(5), np.zeros(59)].astype(np.float32)

    def weighted(model, batch):
        losses = optax.softmax_cross_entropy_with_integer_labels(
            model(batch["x"]), batch["y"]
        )
        total = batch["w"].sum()
        loss = (losses * batch["w"]).sum() / jnp.maximum(total, 1)
        return loss, pj.Aux(metrics={"tokens": total}, weight=total)

    def fresh():
        return nnx.Linear(5, 3, rngs=nnx.Rngs(0))

    batch = batch_at(0) | {"w": weights}
    loss, params, model_state = pj.flax.nnx.split(fresh(), weighted)
    train = pj.make_train_step(loss, optax.sgd(0.1), mesh=pj.data_mesh(4), width=1)
    state, info = train.step(train.init(params, model_state=model_state), batch)
    assert float(info.weight) == 5
    model = fresh()
    grads = nnx.grad(lambda model: weighted(model, batch)[0])(model)
    nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param).update(model, grads)
    chex.assert_trees_all_close(state.params, values(model), rtol=0, atol=1e-7)


def test_model_state_returned_by_the_loss_is_refused():
    loss, params, model_state = pj.flax.nnx.split(
        fresh(), lambda model, batch: (model(batch["x"]).mean(), pj.Aux(model_state=1))
    )
    train = pj.make_train_step(loss, TX, mesh=pj.data_mesh(2))
    state = train.init(params, model_state=model_state, rng=jax.random.key(0))
    with pytest.raises(ValueError, match="`loss_fn` must leave `model_state` to the m"):
        train.step(state, batch_at(0))


class Sown(nnx.Linear):
    def __call__(self, x):
        self.seen = nnx.Intermediate(x.mean())
        return super().__call__(x)


class Counted(nnx.Linear):
    calls = 0

    def __call__(self, x):
        self.calls += 1
        return super().__call__(x) * self.calls


@pytest.mark.parametrize(
    ("kind", "what"),
    [(Sown, r"a new variable model\['seen'\]"), (Counted, "an attribute that has ch")],
)
def test_model_rebuilt_by_its_loss_is_refused(kind, what):
    model = kind(5, 3, rngs=nnx.Rngs(0))
    loss, params, model_state = pj.flax.nnx.split(model, zoo_loss)
    train = pj.make_train_step(loss, TX, mesh=pj.data_mesh(2))
    message = (
        rf"`loss_fn` must change nothing in the model but .* got {what}.* `model.tr"
    )
    with pytest.raises(ValueError, match=message):
        train.step(train.init(params, model_state=model_state), batch_at(0))


def test_sown_values_may_be_returned_as_metrics():
    def loss(model, batch):
        loss = zoo_loss(model, batch)
        seen = nnx.pop(model, nnx.Intermediate)
        return loss, {"seen": seen["seen"].get_value()}

    model = Sown(5, 3, rngs=nnx.Rngs(0))
    loss, params, model_state = pj.flax.nnx.split(model, loss)
    train = pj.make_train_step(loss, TX, mesh=pj.data_mesh(2), width=1)
    state = train.init(params, model_state=model_state)
    _, info = train.step(state, batch_at(0))
    np.testing.assert_allclose(info.metrics["seen"], batch_at(0)["x"].mean(), rtol=1e-5)


def test_evaluation_leaves_training_unchanged():
    """`model.eval()` affects only this model: the loss was split in training mode."""
    model, key = fresh(), jax.random.key(2)
    train, state = start(model, key)
    expected, _ = run(train, train.drain(run(train, state, 2)[0])[0], 2)
    state, _ = train.drain(run(train, state, 2)[0])
    pj.flax.nnx.update(model, state)
    model.eval()
    first, second = (model(batch_at(0)["x"]) for _ in range(2))
    assert_bits_equal(first, second)
    state, _ = run(train, state, 2)
    assert_bits_equal(raw(state), raw(expected))


@pytest.mark.parametrize(
    ("devices", "executor"), [(1, "fused"), (4, "fused"), (4, "host")]
)
def test_local_steps_train_a_model(devices, executor):
    model = fresh()
    pure_loss_fn, params, model_state = pj.flax.nnx.split(model, loss_fn)
    mesh, rounds = pj.data_mesh(devices), {"sync_every": 3, "overlap_steps": 2}
    train = pj.make_local_step(pure_loss_fn, TX, mesh=mesh, executor=executor, **rounds)
    key = jax.random.key(2)
    state = train.init(params, model_state=model_state, rng=key, batch=batch_at(0))
    state, _ = run(train, state)
    with pytest.raises(ValueError, match=r"`state, _ = train.drain\(state\)`"):
        pj.flax.nnx.update(model, state)
    state, _ = train.drain(state)
    pj.flax.nnx.update(model, state)
    assert_bits_equal(model.out.kernel[...], state.params["out"]["kernel"])
    assert_bits_equal(model.norm.mean[...], state.model_state["norm"]["mean"])
    assert_bits_equal(raw(values(model)["dropout"]), raw(values(fresh())["dropout"]))
    model.eval()
    test = batch_at(10_000, size=512)
    hits = np.asarray(model(test["x"])).argmax(-1) == test["y"]
    assert hits.mean() > 0.7


def test_update_with_gradients_in_flight_is_refused():
    model = fresh()
    train, state = start(model, jax.random.key(0))
    state, _ = train.step(state, batch_at(0))
    message = r"got 1 computed .* `state, _ = train.drain\(state\)`"
    with pytest.raises(ValueError, match=message):
        pj.flax.nnx.update(model, state)


def test_keyword_for_random_numbers_may_be_optional():
    def loss(model, batch, rngs=None):
        assert rngs is None
        return jnp.mean(model(batch["x"]) ** 2)

    pure, params, model_state = pj.flax.nnx.split(
        nnx.Linear(5, 3, rngs=nnx.Rngs(0)), loss
    )
    train = pj.make_train_step(pure, optax.sgd(0.1), mesh=pj.data_mesh(2))
    train.step(train.init(params, model_state=model_state), batch_at(0))


def test_missing_shared_input_is_named_with_its_method():
    def loss(model, batch, *, shared):
        return jnp.mean(model(batch["x"]) ** 2) * shared

    pure, params, model_state = pj.flax.nnx.split(
        nnx.Linear(5, 3, rngs=nnx.Rngs(0)), loss
    )
    train = pj.make_train_step(pure, optax.sgd(0.1), mesh=pj.data_mesh(2))
    with pytest.raises(ValueError, match=r"`shared` must be given to `train\.init`"):
        train.init(params, model_state=model_state, batch=batch_at(0))
    state = train.init(params, model_state=model_state)
    with pytest.raises(ValueError, match=r"`shared` must be given to `train\.step`"):
        train.step(state, batch_at(0))
