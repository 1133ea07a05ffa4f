"""Tests the messages for states that a step refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import pipejax as pj
from pipejax import collectives

from ...grid import grid
from ...helpers import assert_bits_equal, batches, init_params, loss_fn
from ...train_step.refusals import BATCH, make, refused


def test_metrics_need_a_batch_at_init():
    def loss(params, batch):
        return loss_fn(params, batch), pj.Aux(metrics={"a": {"b": jnp.ones(())}})

    train = make(loss)
    state = train.init(init_params())
    message = (
        r"`batch` must be given to `train.init` when `loss_fn` returns metrics or .*"
        r"\[\"metrics\['a'\]\['b'\]\"\] .* Call"
        r" `train.init\(params, ..., batch=batch\)`"
    )
    with refused(message):
        train.step(state, BATCH)
    synchronous = make(loss, width=1)
    synchronous.step(synchronous.init(init_params()), BATCH)


def test_state_of_another_type_is_refused():
    train = make()
    for call in (train.drain, lambda s: train.step(s, BATCH)):
        with refused(r"`state` must be the pj.PipelineState that .*, got dict\."):
            call(init_params())


@pytest.mark.parametrize("executor", ["fused", "host"])
def test_donated_state_is_refused(executor):
    train = make(donate=True, executor=executor)
    first = train.init(init_params())
    second, _ = train.step(first, BATCH)
    for use in (train.drain, lambda state: train.step(state, BATCH)):
        with refused("`state` must not have been donated, got one whose `.*` is"):
            use(first)
    train.drain(second)  # the second state is unharmed


@pytest.mark.parametrize("other", [1, 3, 4])
def test_state_of_another_width_is_refused(other):
    train, state = make(), make(width=other).init(init_params())
    message = (
        rf"`state` must be of width 2, as this train step; got one of width {other}."
        r" Drain it with the train step that made it"
    )
    with refused(message):
        train.step(state, BATCH)
    with refused(message):
        train.drain(state)


@pytest.mark.parametrize("width", [1, 2])
def test_state_of_another_mesh_is_refused(width):
    train = make(width=width)
    elsewhere = Mesh(np.array(jax.devices()[2:4]), ("data",))
    message = r"`state` must be of this mesh, on devices \[0, 1\]; got one on devices"
    for other in (make(devices=4, width=width), make(mesh=elsewhere, width=width)):
        state = other.init(init_params())
        for call in (train.drain, lambda s: train.step(s, BATCH)):
            with refused(message + r" \[\d, .*\]. Drain it"):
                call(state)


def test_state_of_another_mesh_is_refused_even_from_the_host():
    """Two devices cannot hold four devices' gradients, even if the host brings them."""
    train, other = make(), make(devices=4)
    state = jax.device_get(other.init(init_params()))
    with refused(r"of this mesh, with 2 devices; got one of 4 devices, .* Drain it"):
        train.step(state, BATCH)
    with refused(r"of this mesh, with 2 devices; got one of 4 devices, .* Drain it"):
        train.drain(state)
    # This is the remedy of the message.
    drained = jax.device_get(other.drain(other.step(state, BATCH)[0])[0])
    state = train.init(drained.params, opt_state=drained.opt_state)
    train.step(state, BATCH)


def test_state_of_another_reduce_dtype_is_refused():
    train = make(reduce_dtype=jnp.bfloat16)
    state = make().init(init_params())
    message = (
        r"`state` must have gradients in flight of these parameters, .*"
        r" `gradients\['bias'\]` bfloat16\[\d+\]; got float32\[\d+\] in its place."
    )
    with refused(message):
        train.step(state, BATCH)
    with refused(message):
        train.drain(state)


def test_state_of_other_metrics_is_refused():
    def loss(params, batch, names="a"):
        metrics = {name: batch["x"].mean() for name in names}
        return loss_fn(params, batch), pj.Aux(metrics=metrics)

    state = make(loss).init(init_params(), batch=BATCH)
    message = (
        r"`state` must have been made for what `loss_fn` returns, {metrics}"
        r"; got one with \[\"metrics\['a'\]\"\] in flight. Drain it"
    )
    with refused(message.replace("{metrics}", r"\[\]")):
        make().step(state, BATCH)
    with refused(message.replace("{metrics}", r"\[.*'a'.*'b'.*\]")):
        make(lambda p, b: loss(p, b, "ab")).step(state, BATCH)
    with refused(message.replace("{metrics}", r"\[\"metrics\['b'\]\"\]")):
        make(lambda p, b: loss(p, b, "b")).step(state, BATCH)
    with refused(message.replace("{metrics}", r"\['weight'\]")):
        weighted = pj.Aux(weight=jnp.float32(2))
        make(lambda p, b: (loss_fn(p, b), weighted)).step(state, BATCH)
    # A drain needs no metrics.
    make().drain(state)


def test_step_is_not_traced_during_the_warm_up():
    train = make(warmup_steps=3)
    state = train.init(init_params())
    message = (
        r"`train.step` must not be traced in a run with `warmup_steps` or .*"
        r" Call it outside jit and scan, or make a train step without them"
    )
    with refused(message):
        jax.jit(train.step)(state, BATCH)
    with refused(message):
        jax.eval_shape(train.drain, state)


def raises_late(params, batch):
    """Fails while it is traced, far inside of the step."""
    return jnp.ones(3)


FAILURES = {
    "batch": lambda train, state: train.step(state, batches(1, 15)[0]),
    "loss": lambda train, state: make(raises_late, donate=True).step(state, BATCH),
    "width": lambda train, state: make(width=3, donate=True).step(state, BATCH),
    "mesh": lambda train, state: make(devices=4, donate=True).step(state, BATCH),
    "dtype": lambda train, state: make(reduce_dtype="bfloat16", donate=True).drain(
        state
    )[0],
    "metrics": lambda train, state: make(
        lambda p, b: (loss_fn(p, b), pj.Aux(metrics=1.0)), donate=True
    ).step(state, BATCH),
}


@grid(1, failure=FAILURES, donate=[True, False])
def test_failed_step_harms_neither_state_nor_parameters(donate, failure):
    train, params = make(donate=donate), jax.tree.map(jnp.asarray, init_params())
    state = train.step(train.init(params), BATCH)[0]
    before = jax.device_get(state)
    with pytest.raises(ValueError, match="must"):
        FAILURES[failure](train, state)
    assert_bits_equal(jax.device_get(state), before)
    assert_bits_equal(params, init_params())
    after, info = train.step(state, BATCH)
    assert bool(info.applied)
    assert int(after.step) == 2


@pytest.mark.parametrize(
    "counted",
    [
        {"warmup_steps": 3},
        {
            "all_reduce": collectives.scheduled(
                [collectives.psum(), collectives.ring()], [2]
            )
        },
    ],
)
def test_state_without_a_counter_is_refused(counted):
    state, train = make().init(init_params()), make(**counted)
    for call in (train.drain, lambda s: train.step(s, BATCH)):
        with refused("`state` must count its steps in a run with `warmup_steps` or"):
            call(state)


@pytest.mark.parametrize("tx", [optax.sgd(0.1, momentum=0.9), optax.adam(0.1)])
@pytest.mark.parametrize("rules", [("linearized", False), (False, "linearized")])
@pytest.mark.parametrize("sharded", [True, False])
def test_state_of_another_prediction_is_refused(tx, rules, sharded):
    """A plain delay would take predictions that were gathered for the parameters."""
    of, into = (
        make(tx=tx, weight_prediction=rule, shard_optimizer=sharded) for rule in rules
    )
    state = of.init(init_params())
    if isinstance(state.opt_state[0], optax.TraceState) and not sharded:
        into.step(state, BATCH)  # it predicts by own gradients, and keeps nothing
        return
    with refused(
        r"`state` must be of a train step with this `weight_prediction`, `tx`"
    ):
        into.step(state, BATCH)


OTHERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(1e-2),
    "half": optax.adam(1e-2, mu_dtype=jnp.bfloat16),
    "clip": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)),
    "rmsprop": optax.rmsprop(1e-2),
    "schedule": optax.adam(optax.linear_schedule(0.1, 0.0, 10)),
}


@pytest.mark.parametrize("sharded", [False, True])
def test_state_of_another_optimizer_is_refused(sharded):
    """Each of them refuses the states of all others before anything is traced."""
    steps = {name: make(tx=tx, shard_optimizer=sharded) for name, tx in OTHERS.items()}
    states = {name: train.init(init_params()) for name, train in steps.items()}
    message = (
        r"`state.opt_state` must be a state of this train step's `tx` for these"
        r" parameters: `state.opt_state.*`.*; got .* in its place. Drain it with"
    )
    for name, train in steps.items():
        for other, state in states.items():
            if other == name:
                continue
            for call in (train.step, train.lower, train.transfers):
                with refused(message):
                    call(state, BATCH)
            with refused(message):
                train.drain(state)


def test_state_of_the_other_kind_of_optimizer_is_refused():
    whole, split = make(), make(shard_optimizer=True)
    states = [train.init(init_params()) for train in (whole, split)]
    for train, state, kinds in (
        (whole, states[1], ("False", "True")),
        (split, states[0], ("True", "False")),
    ):
        message = (
            r"`state` must be of a train step with shard_optimizer={}, as this one; got"
            r" one of a train step with shard_optimizer={}. Drain it with the"
        )
        for call in (train.drain, lambda s, train=train: train.step(s, BATCH)):
            with refused(message.format(*kinds)):
                call(state)


def test_state_of_other_axes_is_refused():
    """The devices are the same, but in groups."""
    mesh = pj.data_mesh(4, axis_name=("host", "fsdp"), hosts=2)
    groups = make(mesh=mesh, axis_name="host")
    every = make(mesh=mesh, axis_name=("host", "fsdp"))
    message = r"`state` must be of a mesh with the inner axes \({}\), as .* with \({}\)"
    with refused(message.format("'fsdp',", "")):
        groups.step(every.init(init_params()), BATCH)
    with refused(message.format("", "'fsdp',")):
        every.drain(groups.init(init_params()))


def test_state_without_the_arguments_of_the_loss_is_refused():
    def loss(params, batch, *, model_state):
        return loss_fn(params, batch), pj.Aux(model_state=model_state)

    with refused(r"`model_state` must be given to `train.init`, because `loss_fn`"):
        make(loss).step(make().init(init_params()), BATCH)
    state = make(loss).init(init_params(), model_state=jnp.int32(0))
    with refused(r"`loss_fn` must take the keyword `model_state`, which `train.init`"):
        make().step(state, BATCH)


def test_gradient_in_flight_is_not_kept_through_a_warm_up():
    """It would be applied after the warm-up, many updates late."""
    short, long = (
        pj.make_train_step(
            loss_fn, optax.sgd(0.1), mesh=pj.data_mesh(2), warmup_steps=steps
        )
        for steps in (1, 9)
    )
    data = batches(3)
    state = short.init(init_params())
    for batch in data[:2]:
        state, _ = short.step(state, batch)
    with pytest.raises(ValueError, match=r"nothing in flight in a warm-up.* got one"):
        long.step(state, data[2])
    own, _ = long.step(long.init(init_params()), data[0])
    with pytest.raises(ValueError, match=r"nothing in flight in a warm-up.* got one"):
        long.step(state, data[2])
    long.step(own, data[1])
    state, _ = short.drain(state)
    long.step(state, data[2])


def test_state_of_other_hosts_is_refused():
    axes = "host", "device"
    first, second = (
        pj.make_train_step(
            loss_fn,
            optax.sgd(0.1),
            mesh=pj.data_mesh(8, axis_name=axes, hosts=hosts),
            axis_name=axes,
        )
        for hosts in (2, 4)
    )
    state = first.init(init_params())
    wanted = r"on which 4 devices or hosts have gradients .* got one with 2"
    with pytest.raises(ValueError, match=wanted):
        second.step(state, batches(1)[0])
