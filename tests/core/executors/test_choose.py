import logging

import optax
import pytest

import pipejax as pj

from ...helpers import loss_fn


def make(**options):
    return pj.make_train_step(loss_fn, optax.sgd(0.1), mesh=pj.data_mesh(2), **options)


def test_single_cpu_process_uses_the_fused_executor(caplog):
    caplog.set_level(logging.INFO, logger="pipejax")
    executor = make().executor
    assert executor.name == "fused"
    assert executor.reason == "one process on CPU, with no network to wait for"
    assert f"executor fused: {executor.reason}" in caplog.text


@pytest.mark.parametrize("name", ["fused", "host"])
def test_requested_executor_is_used(name):
    executor = make(executor=name).executor
    assert (executor.name, executor.reason) == (name, "asked for")


@pytest.mark.parametrize("made_by", [pj.make_train_step, pj.make_local_step])
def test_single_device_has_no_exchange_for_the_host_executor(made_by):
    mesh = pj.data_mesh(1)
    executor = made_by(loss_fn, optax.sgd(0.1), mesh=mesh, executor="host").executor
    assert executor.name == "fused"
    assert executor.reason == "one device, which exchanges nothing"


@pytest.mark.parametrize("name", ["gpu", "", None, 1])
def test_unknown_executor_is_refused(name):
    message = rf"`executor` must be 'auto', 'fused' or 'host', got {name!r}"
    with pytest.raises(ValueError, match=message):
        make(executor=name)
