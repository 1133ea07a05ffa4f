"""Tests that "auto" moves to one program if loss or optimizer has a collective."""

import dataclasses
import time

import pytest

from pipejax._core.executors import Fused
from pipejax._core.executors._host import Host
from pipejax._internal.hlo._collective_groups import CollectiveGroups
from pipejax.train_step import TrainStep

from ..core.executors.digits import (
    Appending,
    batch_of,
    config_of,
    number_of,
    start,
    written,
)
from ..helpers import wrap_exchange

REASON = "`loss_fn` or `tx` has a collective between processes, all-reduce ("


@pytest.fixture
def between_processes(monkeypatch):
    """Makes every collective count as one between processes."""
    for module in ("_host", "_fused"):
        where = f"pipejax._core.executors.{module}.spans_cpu_processes"
        monkeypatch.setattr(where, lambda mesh: True)
    monkeypatch.setattr(CollectiveGroups, "crosses_processes", True)


class Auto:
    """Runs the steps of `config` as a train step with executor="auto" does."""

    def __init__(self, config):
        self.train = TrainStep(config, "auto")
        # `cached_property` stores it here.
        self.train.__dict__["_executors"] = [Host(config, "two processes")]

    def step(self, state, batch):
        return self.train._run(0, lambda executor: executor.step(state, batch))

    def drain(self, state):
        return self.train._run(0, lambda executor: executor.drain(state))

    @property
    def executor(self):
        return self.train.executor


def test_auto_starts_as_the_host_executor():
    config = config_of(Appending())
    auto = Auto(config).executor
    assert (auto.name, auto.reason) == ("host", "two processes")
    assert auto.compiler_options == {}
    assert auto.reduction_mesh is config.mesh
    text = auto.lower(start(config), batch_of(1)).as_text()
    assert "all_reduce" not in text


@pytest.mark.usefixtures("between_processes")
def test_auto_stays_the_host_executor_without_own_collectives():
    config = config_of(Appending())
    auto = Auto(config)
    assert written(auto, config, [1, 2, 3]) == [0, 1, 12, 123]
    executor = auto.executor
    assert (executor.name, executor.reason) == ("host", "two processes")


@pytest.mark.usefixtures("between_processes")
@pytest.mark.parametrize("own", ["compute", "apply"])
def test_auto_takes_a_step_with_an_own_collective_in_one_program(own):
    """The step that finds the collective is taken once, although it starts twice."""
    config = config_of(Appending(own))
    auto = Auto(config)
    assert written(auto, config, [1, 2, 3]) == [0, 1, 12, 123]
    assert auto.executor.name == "fused"
    assert auto.executor.reason.startswith(REASON)


@pytest.mark.usefixtures("between_processes")
@pytest.mark.parametrize(("own", "name"), [("compute", "host"), ("apply", "fused")])
def test_drain_has_only_the_collectives_of_the_update(own, name):
    config = config_of(Appending(own), width=3)
    fused, auto = Fused(config, "asked for"), Auto(config)
    state = start(config)
    for digit in (1, 2, 3):
        state, _ = fused.step(state, batch_of(digit))
    state, infos = auto.drain(state)
    assert number_of(state) == 123
    assert list(map(bool, infos)) == [True, True]
    assert auto.executor.name == name


@pytest.mark.usefixtures("between_processes")
def test_no_reduction_is_under_way_when_the_executor_changes():
    """The program has a collective, which must not meet those of the thread."""
    work = Appending("apply")
    config = config_of(work)
    auto = Auto(config)

    def recorded(exchange, *args):
        time.sleep(0.2)
        work.traced.append("reduced")
        return exchange(*args)

    wrap_exchange(auto.executor, recorded)
    auto.step(start(config), batch_of(1))
    # One of the two reductions is waited for; the other one is started for the next
    # step.
    assert work.traced.count("reduced") == 2
    assert work.traced[-2:] == ["compute", "apply"], "in one program"


class UnpluggedError(Exception):
    """Stands for the error of a broken network."""


@pytest.mark.usefixtures("between_processes")
def test_requested_host_executor_is_kept():
    """Only "auto" moves: the error names the collective and the remedy."""
    auto = Auto(config_of(Appending("compute")))
    auto.train = dataclasses.replace(auto.train, executor_name="host")
    auto.train.__dict__["_executors"] = [Host(auto.train.config, "asked for")]
    with pytest.raises(ValueError, match=r"must not be 'host' .* Choose executor='f"):
        auto.step(start(auto.train.config), batch_of(1))
    assert auto.executor.name == "host"


def test_other_errors_reach_the_caller():
    config = config_of(Appending(), width=1)
    auto = Auto(config)

    def broken(*args):
        raise UnpluggedError

    wrap_exchange(auto.executor, broken)
    with pytest.raises(UnpluggedError):
        auto.step(start(config), batch_of(1))
    assert auto.executor.name == "host"
