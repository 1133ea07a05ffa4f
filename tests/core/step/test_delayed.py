"""Tests gradients that are not delayed beside others that are, against a recursion."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pipejax as pj
from pipejax import checkpoint, codecs, collectives
from pipejax._core.message import parted_states
from pipejax._core.step import delays

from ...grid import grid
from ...helpers import (
    HELD,
    OPTIMIZERS,
    assert_bits_equal,
    batches,
    init_params,
    loss_fn,
    trajectory,
)
from ...reference import linearized, mean, split
from ...train_step.refusals import refused
from .parts import (
    PARAMS,
    STEPS,
    groups,
    noting_norm,
    trained,
    with_and_without_a_restart,
)

FULL = pytest.mark.full
WORKERS = 4
DELAYED = {"hidden": True, "bias": False, "out": True}
FEEDBACK = collectives.two_shot(codecs.error_feedback(codecs.int8(8)))


def make(tx=OPTIMIZERS["adamw"], *, loss=loss_fn, devices=WORKERS, **settings):
    settings = {"delayed": DELAYED, "mesh": pj.data_mesh(devices)} | settings
    return pj.make_train_step(loss, tx, **settings)


def chosen(late, rest):
    """Returns the delayed leaves of one tree, and the others of another."""
    return {name: (late if flag else rest)[name] for name, flag in DELAYED.items()}


def by_hand(name, data, *, width, rule, warmup_steps=0):
    """Returns the parameters after every step and after the drain.

    A gradient that has not arrived is zero to the optimizer, and moves nothing. Each
    kind of parameter has an optimizer of its own, which sees all gradients.
    """
    tx = OPTIMIZERS[name]
    grad = jax.jit(jax.grad(loss_fn))
    w = init_params()
    s = {True: tx.init(w), False: tx.init(w)}  # by whether it is of what is delayed
    zeros = jax.tree.map(np.zeros_like, w)
    queue, history, last, fresh_mean = [], [], None, zeros

    def update(g, s, w, *, late, rest):
        found = {}, {}
        for kind, arrived in ((True, late), (False, rest)):
            u, after = tx.update(g, s[kind], w)
            moved = optax.apply_updates(w, u), after
            for one, each in zip(
                found, moved if arrived else (w, s[kind]), strict=True
            ):
                one[kind] = each
        params, states = found
        return chosen(params[True], params[False]), states

    def point(own):
        """Returns where a worker takes its gradient."""
        if rule == "linearized" and name in HELD and last is not None and own:
            own = [chosen(g, last) for g in own]
            return chosen(linearized(HELD[name], w, s[True], last, own), w)
        at, state = w, s
        filled = fresh_mean if rule == "linearized" and name in HELD else zeros
        for g in own if rule else ():
            at, state = update(chosen(g, filled), state, at, late=True, rest=False)
        return at

    for t, batch in enumerate(data):
        fresh = [
            jax.tree.map(np.asarray, grad(point([each[i] for each in queue]), share))
            for i, share in enumerate(split(batch, WORKERS))
        ]
        queue.append(fresh)
        due = queue.pop(0) if t < warmup_steps or len(queue) == width else None
        fresh_mean = mean(fresh)
        whole = chosen(zeros if due is None else mean(due), fresh_mean)
        w, s = update(whole, s, w, late=due is not None, rest=True)
        # A prediction expands the update at the mean that was applied last, by kind.
        if due is not None or last is not None:
            last = whole if due is not None else chosen(last, fresh_mean)
        history.append(w)
    for due in queue:
        w, s = update(chosen(mean(due), zeros), s, w, late=True, rest=False)
    return [*history, w]


@grid(
    1,
    name=OPTIMIZERS,
    width=[2, 3],
    rule=["linearized", "own", False],
    executor=["fused", "host"],
    warmup_steps=[0, 2],
)
def test_training_equals_the_recursion_by_hand(
    name, width, rule, executor, warmup_steps
):
    train = make(
        OPTIMIZERS[name],
        width=width,
        weight_prediction=rule,
        executor=executor,
        warmup_steps=warmup_steps,
    )
    data = batches(STEPS)
    expected = by_hand(name, data, width=width, rule=rule, warmup_steps=warmup_steps)
    found = trajectory(train, init_params(), data)
    chex.assert_trees_all_close(found, expected, rtol=0, atol=4e-6)


def test_optimizer_state_is_held_with_its_parameters():
    """Also the drain leaves moments of gradients that are not delayed."""
    train = make(weight_prediction=False)
    state = train.init(init_params())
    after, info = train.step(state, batches(1)[0])
    assert not info.arrived
    assert info.applied
    moments = after.opt_state[0].mu
    assert [bool(np.any(moments[name])) for name in DELAYED] == [False, True, False]
    drained, _ = train.drain(after)
    assert_bits_equal(drained.params["bias"], after.params["bias"])
    assert_bits_equal(drained.opt_state[0].mu["bias"], moments["bias"])
    assert np.any(drained.opt_state[0].mu["out"])


BOTH = {"late": True, "now": False}


def constant(params, batch):
    """Has the gradient `batch` for each element, if `batch` is the same everywhere."""
    return (params["late"].sum() + params["now"].sum()) * batch.mean()


def run_with_drains(tx, *, width, epochs, steps, executor="fused"):
    """Returns the state before, and the states after every step and every drain."""
    train = make(
        tx,
        loss=constant,
        devices=2,
        delayed=BOTH,
        width=width,
        weight_prediction=False,
        executor=executor,
    )
    states = [train.init({name: jnp.zeros((2, 2)) for name in BOTH})]
    for _ in range(epochs):
        for _ in range(steps):
            states.append(train.step(states[-1], np.ones(4, np.float32))[0])
        states.append(train.drain(states[-1])[0])
    return states


@pytest.mark.parametrize(
    "tx",
    [
        optax.MultiSteps(optax.sgd(1.0), 2),
        optax.chain(optax.apply_every(2), optax.sgd(0.5)),
    ],
)
def test_accumulated_gradients_are_all_applied_once(tx):
    """Three steps and a drain leave one gradient of two, for the next three steps."""
    end = run_with_drains(tx, width=2, epochs=4, steps=3)[-1].params
    assert {name: float(x[0, 0]) for name, x in end.items()} == {"late": -6, "now": -6}


@grid(1, width=[2, 4], executor=["fused", "host"])
def test_schedule_counts_the_updates_of_each_kind(width, executor):
    """After a drain, they are as many as batches."""
    tx = optax.sgd(optax.linear_schedule(1.0, 0.0, 10))
    states = run_with_drains(tx, width=width, epochs=2, steps=5, executor=executor)
    rates = -np.cumsum(1 - np.arange(10) / 10)
    now = [float(state.params["now"][0, 0]) for state in states]
    np.testing.assert_allclose([*now[1:6], *now[7:12]], rates, atol=1e-6)
    ends = [float(states[t].params["late"][0, 0]) for t in (6, 12)]
    np.testing.assert_allclose(ends, rates[[4, 9]], atol=1e-6)


FACTORED = optax.adafactor(
    0.1, 2, multiply_by_parameter_scale=False, clipping_threshold=None
)


@pytest.mark.parametrize(
    ("tx", "step"),
    [
        (optax.adam(0.1, b1=0.0), 0.1),
        (optax.adam(0.1), 0.1),
        (FACTORED, 0.1),
        (optax.novograd(0.1, b1=0.0), 0.05),
        (optax.flatten(optax.adam(0.1)), 0.1),
    ],
)
def test_constant_gradient_gives_each_kind_constant_steps(tx, step):
    """Moments and counts of a kind are of steps alone in which it has a gradient."""
    states = run_with_drains(tx, width=4, epochs=2, steps=5)
    updates = {
        "late": [0, 0, 0, 0, 1, 2, 5, 5, 5, 5, 6, 7, 10],
        "now": [0, 1, 2, 3, 4, 5, 5, 6, 7, 8, 9, 10, 10],
    }
    for name, count in updates.items():
        found = [float(state.params[name][0, 0]) for state in states]
        np.testing.assert_allclose(found, -step * np.array(count), rtol=1e-3)


@pytest.mark.parametrize("wrapped", [False, True])
def test_changed_hyperparameter_acts_on_both_kinds(wrapped):
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=1.0)
    if wrapped:
        tx = optax.apply_if_finite(tx, 3)
    train = make(tx, loss=constant, devices=2, delayed=BOTH, weight_prediction=False)
    state = train.init({name: jnp.zeros(2) for name in BOTH})
    found = []
    for rate in (1.0, 1.0, 0.25, 0.25):
        inner = state.opt_state.inner_state if wrapped else state.opt_state
        rates = inner.hyperparams | {"learning_rate": jnp.float32(rate)}
        inner = inner._replace(hyperparams=rates)
        opt_state = state.opt_state._replace(inner_state=inner) if wrapped else inner
        state = state._replace(trainable=state.trainable._replace(opt_state=opt_state))
        state, _ = train.step(state, np.ones(4, np.float32))
        found.append([float(state.params[name][0]) for name in BOTH])
    assert found == [[0, -1], [-1, -2], [-1.25, -2.25], [-1.5, -2.5]]


def test_gradient_at_once_is_taken_at_the_parameters():
    def noting(params, batch):
        noted = {name: leaf.ravel()[0] for name, leaf in params.items()}
        return loss_fn(params, batch), pj.Aux(metrics=noted)

    def full(params, batch):
        return noting(params, batch)

    train, data = make(loss=full), batches(4)
    state, points, infos = train.init(init_params(), batch=data[0]), [], []
    for batch in data:
        points.append(jax.device_get(state.params))
        state, info = train.step(state, batch)
        infos.append(info)
    for before, info in zip(points[1:-1], infos[2:], strict=True):
        noted = info.metrics
        assert float(noted["bias"]) == pytest.approx(float(before["bias"][0]), abs=1e-7)
        assert float(noted["out"]) != pytest.approx(
            float(before["out"][0, 0]), abs=1e-5
        )


@pytest.mark.parametrize("executor", ["fused", "host"])
def test_codecs_of_both_kinds_keep_their_own_residuals(executor):
    train, data = make(all_reduce=FEEDBACK, executor=executor), batches(3)
    state = train.init(init_params())
    for batch in data:
        state, _ = train.step(state, batch)
    late, at_once = parted_states(state.in_flight.codec_states)
    assert late.keys() == at_once.keys()
    sizes = [sum(x.size for x in jax.tree.leaves(each)) for each in (late, at_once)]
    assert sizes[0] > sizes[1] > 0
    assert all(np.any(x) for x in jax.tree.leaves(at_once))


SCHEDULED = collectives.scheduled([collectives.psum(), FEEDBACK], [3])
SETTINGS = {
    "codec": {"all_reduce": FEEDBACK},
    "default": {},
    "width 3": {"width": 3},
    "microbatches": {"microbatches": 2},
    "donated": {"donate": True},
    "bfloat16": {"reduce_dtype": jnp.bfloat16},
    "scheduled": {"all_reduce": SCHEDULED},
    "warm-up": {"warmup_steps": 2},
}


@grid(0, name=SETTINGS)
def test_both_executors_have_the_same_bits(name):
    ends = (trained(make, executor=x, **SETTINGS[name]) for x in ("fused", "host"))
    assert_bits_equal(*ends)


def test_function_and_prefix_choose_the_same():
    def choose(params):
        return {name: name != "bias" for name in params}

    runs = [
        trajectory(make(delayed=each), init_params(), batches(3))
        for each in (DELAYED, choose)
    ]
    assert_bits_equal(*runs)
    nested = {"a": {"b": jnp.ones(2), "c": jnp.ones(3)}, "d": jnp.ones(1)}
    found = delays({"a": True, "d": False}, nested)
    assert found == {"a": {"b": True, "c": True}, "d": False}


def test_all_delayed_is_the_program_without_the_argument():
    def text(delayed):
        train = make(delayed=delayed)
        state = train.abstract_state(init_params())
        return train.lower(state, batches(1)[0]).as_text()

    assert text(None) == text({name: True for name in DELAYED})


def test_delay_of_nothing_else_changes_synchronous_training():
    found, wanted = (
        trajectory(make(width=1, delayed=each), init_params(), batches(3))
        for each in (DELAYED, None)
    )
    assert_bits_equal(found, wanted)


@pytest.mark.parametrize("executor", ["fused", "host"])
def test_each_kind_of_gradient_is_skipped_alone(executor):
    """The loss is linear, so that a NaN in one input spoils one gradient."""

    def loss(params, batch):
        return jnp.mean(batch["x"] @ params["late"]) + jnp.mean(
            batch["y"] @ params["now"]
        )

    ones = {"x": np.ones((4, 2), np.float32), "y": np.ones((4, 3), np.float32)}
    bad = [{**ones, name: ones[name] * np.nan} for name in ("x", "y")]
    train = make(
        optax.sgd(1.0),
        loss=loss,
        devices=2,
        delayed={"late": True, "now": False},
        executor=executor,
    )
    state = train.init({"late": jnp.zeros(2), "now": jnp.zeros(3)})
    found = []
    for batch in (ones, bad[0], ones, bad[1], ones):
        state, info = train.step(state, batch)
        row = float(state.params["late"][0]), float(state.params["now"][0])
        found.append((*row, int(info.skipped)))
    # A step moves `now` by its own batch, and `late` by that of the step before.
    assert found == [
        (0, -1, 0),
        (-1, -2, 0),
        (-1, -3, 1),
        (-2, -3, 2),
        (-3, -4, 2),
    ]


def test_norm_equals_the_gradient_of_the_optimizer():
    train = make(optax.chain(noting_norm(), optax.sgd(0.1)), width=3)
    state = train.init(init_params())
    for t, batch in enumerate(batches(5)):
        state, info = train.step(state, batch)
        assert np.isnan(info.grad_norm) == (t < 2)
        if t >= 2:
            assert info.grad_norm == pytest.approx(float(state.opt_state[0]), rel=1e-6)


@pytest.mark.parametrize("executor", ["fused", "host"])
def test_weights_divide_both_kinds(executor):
    """Devices of other weights give the step of one device with the whole batch."""

    def loss(params, batch):
        error = (batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2
        count = batch["keep"].sum()
        value = (error * batch["keep"]).sum() / jnp.maximum(count, 1)
        return value, pj.Aux(weight=count)

    rng = np.random.default_rng(0)
    data = [
        {
            "x": rng.normal(size=(8, 3)).astype(np.float32),
            "y": rng.normal(size=8).astype(np.float32),
            "keep": np.float32([1, 0, 1, 1, 0, 0, 1, 1]),
        }
        for _ in range(4)
    ]
    first = {"w": np.ones(3, np.float32), "b": np.float32(0)}

    def run(devices):
        train = make(
            optax.sgd(0.1),
            loss=loss,
            devices=devices,
            delayed={"w": True, "b": False},
            weight_prediction=False,
            executor=executor,
        )
        state = train.init(first, batch=data[0])
        for batch in data:
            state, _ = train.step(state, batch)
        return train.drain(state)[0].params

    chex.assert_trees_all_close(run(4), run(1), rtol=0, atol=1e-6)


def test_loss_of_an_update_is_never_of_no_batch():
    """Before a delayed loss has arrived, the optimizer is given that of this step."""
    tx = optax.chain(
        optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1, cooldown=0)
    )
    train = make(tx, weight_prediction=False)
    state, _ = train.step(train.init(init_params()), batches(1)[0])
    assert float(state.opt_state[-1].best_value) > 0.1


@pytest.mark.parametrize("executor", ["fused", pytest.param("host", marks=FULL)])
def test_groups_equal_devices(executor):
    """Groups that shard parameters give the parameters of as many devices."""
    mesh, sharded = groups()
    alone = make(devices=2, executor=executor)
    train = make(mesh=mesh, axis_name="host", executor=executor)
    found, wanted = (
        trajectory(each, start, batches(4))[-1]
        for each, start in ((train, sharded), (alone, PARAMS))
    )
    chex.assert_trees_all_close(found, wanted, rtol=0, atol=2e-6)


def test_restored_run_continues_bit_for_bit(tmp_path):
    def coded(**settings):
        return make(all_reduce=FEEDBACK, **settings)

    assert_bits_equal(*with_and_without_a_restart(coded, tmp_path / "run"))
    other = coded(delayed=None)
    with (
        checkpoint.manager(tmp_path / "run") as manager,
        refused("the form of the checkpoint in .*optimizer and options that it was"),
    ):
        checkpoint.restore(manager, other, other.init(init_params()))


@pytest.mark.parametrize(
    ("before", "after"), [(None, DELAYED), pytest.param(DELAYED, None, marks=FULL)]
)
def test_drained_checkpoint_continues_with_another_choice(tmp_path, before, after):
    """The run is that of `train.init` with the drained parameters and their state."""
    settings = {"donate": True, "weight_prediction": False}
    train, other = (make(delayed=x, **settings) for x in (before, after))
    state = train.init(init_params())
    for batch in batches(3):
        state, _ = train.step(state, batch)
    state, _ = train.drain(state)
    fresh = other.init(state.params, opt_state=state.opt_state)
    with checkpoint.manager(tmp_path) as manager:
        checkpoint.save(manager, state)
        restored = checkpoint.restore(manager, other, other.init(init_params())).state
    runs = fresh, restored
    for batch in batches(2):
        runs = [other.step(state, batch)[0] for state in runs]
    assert_bits_equal(*[other.drain(state)[0].params for state in runs])


def test_state_of_another_choice_is_refused():
    state = make(delayed=None).init(init_params())
    with refused("`state` must have gradients in flight of .* this `delayed`"):
        make().step(state, batches(1)[0])


def test_transfers_list_both_exchanges():
    train, whole = make(), make(delayed=None)
    batch = batches(1)[0]
    found, wanted = (
        each.transfers(each.abstract_state(init_params()), batch)
        for each in (train, whole)
    )
    assert found[0].bytes == 4 * 7  # the bias
    # The loss goes with both.
    assert sum(x.bytes for x in found) == sum(x.bytes for x in wanted) + 4


def test_unequal_values_are_refused_with_a_remedy():
    def starts(delayed, **settings):
        return make(delayed=delayed, **settings).init(init_params())

    with refused(r"`delayed` must hold bools, got 1 for params\['bias'\]"):
        starts(DELAYED | {"bias": 1})
    with refused("`delayed` must be a pytree of bools with the structure of `params`"):
        starts({"hidden": True})
    with refused("`delayed` must be true for at least one parameter.*width=1"):
        starts(False)
    with refused("`delayed` must be None with shard_optimizer=True"):
        starts(DELAYED, shard_optimizer=True)


def test_traced_steps_equal_single_steps():
    train, data = make(), batches(4)
    stacked = jax.tree.map(lambda *x: np.stack(x), *data)

    @jax.jit
    def run(state, stacked):
        return jax.lax.scan(train.step, state, stacked)[0]

    state = train.init(init_params())
    together = run(state, stacked)
    for batch in data:
        state, _ = train.step(state, batch)
    chex.assert_trees_all_close(together.params, state.params, rtol=0, atol=1e-6)


def test_frozen_parameters_are_in_neither_part():
    tx = optax.partition(
        {"moves": optax.adam(0.1), "stays": optax.set_to_zero()},
        {"hidden": "moves", "bias": "moves", "out": "stays"},
    )
    train = make(tx)
    state = train.init(init_params())
    assert state.in_flight.pending[0].gradients["out"] is None
    for batch in batches(3):
        state, _ = train.step(state, batch)
    assert_bits_equal(state.params["out"], init_params()["out"])
    assert all(
        np.any(state.params[name] != init_params()[name]) for name in ("hidden", "bias")
    )


def test_gradients_at_once_travel_beside_the_backward_pass():
    """On GPUs, what is exchanged at once has half of a deep backward pass beside it."""
    pytest.importorskip("jax_plugins.xla_cuda12")
    pytest.importorskip("nvidia.cuda_nvcc")

    def deep(params, batch):
        x = batch
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    devices = pj.overlap.topology("h100:1x1x8")
    train = pj.make_train_step(
        deep,
        optax.adam(0.1),
        mesh=pj.data_mesh(devices=devices),
        delayed=[True] * 4 + [False] * 4,
    )
    params = [jax.ShapeDtypeStruct((1024, 1024), jnp.float32)] * 8
    batch = jax.ShapeDtypeStruct((8 * 512, 1024), jnp.float32)
    report = pj.overlap.inspect(train, train.abstract_state(params), batch)
    large = sorted(c.share for c in report.collectives if c.bytes > 1e6)
    assert large[-1] > 0.95
    assert large[0] > 0.3


def test_delay_of_frozen_parameters_alone_is_refused():
    tx = optax.partition(
        {"trained": optax.sgd(0.1), "frozen": optax.set_to_zero()},
        {"hidden": "frozen", "bias": "trained", "out": "trained"},
    )
    only = {"hidden": True, "bias": False, "out": False}
    train = pj.make_train_step(loss_fn, tx, mesh=pj.data_mesh(2), delayed=only)
    with refused("`delayed` must be true for at least one parameter that `tx` trains"):
        train.init(init_params())
