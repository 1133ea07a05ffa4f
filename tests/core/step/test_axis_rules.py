"""Tests partition specs in a loss that name the axis of the groups."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pipejax as pj

from ...helpers import assert_bits_equal

BOTH = P(("host", "fsdp"))


def trained(constrain, kind=AxisType.Auto):
    """Returns the parameters after a step of a loss with a constraint on its batch."""
    mesh = jax.make_mesh(
        (2, 2), ("host", "fsdp"), (kind,) * 2, devices=jax.devices()[:4]
    )

    def loss_fn(w, batch):
        return jnp.mean(constrain(batch, mesh) * w[None, :]) ** 2

    train = pj.make_train_step(
        loss_fn, optax.sgd(0.1), mesh=mesh, axis_name="host", width=1
    )
    w = jax.device_put(np.ones(4, np.float32), NamedSharding(mesh, P("fsdp")))
    batch = np.arange(32, dtype=np.float32).reshape(8, 4)
    batch = train.batch(batch, axis_name=("host", "fsdp"))
    state, _ = train.step(train.init(w), batch)
    return state.params


CASES = {
    "constraint": (AxisType.Auto, jax.lax.with_sharding_constraint),
    "reshard": (AxisType.Explicit, jax.sharding.reshard),
    "out_sharding": (
        AxisType.Explicit,
        lambda x, spec: x + jnp.zeros(x.shape, out_sharding=spec),
    ),
}


@pytest.mark.parametrize(("kind", "constrain"), CASES.values(), ids=CASES)
def test_spec_with_the_axis_of_the_groups_is_refused(kind, constrain):
    rule = (
        r"`loss_fn` must not name 'host' in partition specs, .*; got"
        r" P\(\('host', 'fsdp'\),\). Leave 'host' out of the spec"
    )
    with pytest.raises(ValueError, match=rule):
        trained(lambda x, mesh: constrain(x, BOTH), kind)


def test_other_errors_of_specs_stay_unchanged():
    with pytest.raises(ValueError, match="You probably meant to use `reshard`"):
        trained(
            lambda x, mesh: jax.lax.with_sharding_constraint(x, P("fsdp")),
            AxisType.Explicit,
        )


@pytest.mark.parametrize(
    "rules",
    [
        [("batch", ("host", "fsdp")), ("width", None)],
        [("batch", ("host",)), ("batch", "host"), ("width", "fsdp")],
    ],
)
def test_axis_of_the_groups_is_left_out_of_rules_of_flax(rules):
    def logical(x, mesh):
        return nn.with_logical_constraint(x, ("batch", "width"))

    wanted = trained(lambda x, mesh: x)
    with nn.logical_axis_rules(rules):
        assert_bits_equal(trained(logical), wanted)
        assert list(nn.get_logical_axis_rules()) == rules
