"""Tests the text of settings that processes compare."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pipejax as pj
from pipejax import codecs, collectives
from pipejax.train_step._one_program import described, settings_of


def texts(tx=None, mesh=None, **options):
    tx, mesh = tx or optax.adam(0.1), mesh or pj.data_mesh(2)
    train = pj.make_train_step(
        lambda w, batch: (w * batch).sum(), tx, mesh=mesh, **options
    )
    return settings_of(train.phases, train.abstract_state(jnp.ones(4)).opt_state)


KEY = jax.random.key(0)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("width", {"width": 3}),
        ("all_reduce", {"all_reduce": collectives.ring()}),
        ("all_reduce", {"all_reduce": collectives.two_shot(codecs.int8(64))}),
        ("weight_prediction", {"weight_prediction": "own"}),
        ("microbatches", {"microbatches": 2}),
        ("compute_dtype", {"compute_dtype": "bfloat16"}),
        ("reduce_dtype", {"reduce_dtype": np.float16}),
        ("shard_optimizer", {"shard_optimizer": True}),
        ("skip_nonfinite", {"skip_nonfinite": False}),
        ("tx", {"tx": optax.sgd(0.1)}),
    ],
)
def test_every_setting_has_a_text_of_its_own(name, options):
    found, plain = texts(**options), texts()
    assert [key for key in plain if found[key] != plain[key]] == [name]


def test_codec_at_once_is_told_by_its_rank():
    first, second = (texts(at_once=codecs.power_sgd(rank, KEY)) for rank in (1, 2))
    assert [key for key in first if first[key] != second[key]] == ["at_once"]


def test_dtypes_have_one_name_each():
    assert texts(reduce_dtype="bfloat16") == texts(reduce_dtype=jnp.bfloat16)


def test_text_has_no_addresses():
    """They differ between processes."""

    def rule(layer):
        return layer

    assert described((rule, KEY, object())) == "tuple(function, PRNGKeyArray, object)"
