"""Tests the results on sharded models, and what the document says about them."""

import functools
import statistics

import pytest

from experiments.report import result
from experiments.sharded import nanogpt

from .quoted import quoted_in

SHARDED = "K=2, ZeRO-1"
quoted = quoted_in("docs/sharded.md")


@functools.cache
def cells():
    return result("sharded_compiled")["cells"]


@quoted
def test_delay_costs_quoted_shards_of_memory():
    def more(target, *steps):
        found = [
            x["more_memory"]
            for x in cells()
            if x["target"].startswith(target) and x["step"] in steps
        ]
        least, most = (f"{of(found):.1f}" for of in (min, max))
        return least if least == most else f"{least} to {most}"

    plain, eight = ("K=2", "K=2, plain"), "K=2, int8"
    yield f"On TPUs, it costs {more('tpu', *plain, eight)}."
    yield (
        f"costs {more('h100', *plain)} shards more than D-Sync, and"
        f" {more('h100', eight)} with eight bits"
    )


@quoted
def test_losses_of_nanogpt_are_quoted():
    def of(*contender):
        contender = nanogpt.Contender(*contender)
        return nanogpt.losses(result("sharded_nanogpt")["cells"], contender)

    def more(optimizer, *devices):
        own, twin = of(optimizer, 2, *devices), of(optimizer, 1, 4, 1)
        assert own.keys() == twin.keys() == {0, 1, 2}
        return [own[seed] - twin[seed] for seed in own]

    four, two = more("adamw", 4, 1), more("adamw", 2, 2)
    muon = statistics.mean(more("muon", 4, 1))
    alone, on_four = of("muon", 1, 1, 1), of("muon", 1, 4, 1)
    yield f"AdamW ends at {statistics.mean(of('adamw', 1, 4, 1).values()):.3f} nats"
    yield f"end {statistics.mean(four):.3f} nats higher than at K=1"
    yield f"six sequences each end {statistics.mean(two):.3f} nats higher"
    yield f"K=2 ends {abs(muon):.3f} nats {'higher' if muon > 0 else 'lower'}"
    ends = (f"{min(each):.3f} to {max(each):.3f}" for each in (four, two))
    yield f"end {' and '.join(ends)} nats higher"
    yield f"to {max(abs(alone[seed] - on_four[seed]) for seed in on_four):.3f} nats"


@quoted
def test_steps_on_two_hosts_are_quoted():
    found = result("sharded_cluster")["cells"]
    (methods,) = (x["methods"] for x in found if x["hosts"] == 2)
    pipe, sync = (
        statistics.median(methods[name]["seconds"]) for name in ("Pipe-SGD", "D-Sync")
    )
    yield f"a pipelined step takes {pipe / sync:.2f} of the time of D-Sync"


@quoted
def test_exchange_is_hidden_and_groups_send_as_twin():
    for cell in cells():
        step, covered = cell["step"], cell["covered_between"]
        if step == "D-Sync":
            assert covered < 0.015
        elif step != SHARDED:
            assert covered > 0.995
            exception = (cell["size"], cell["target"]) == ("7B", "tpu:2xv5e:4x4")
            assert cell["checks"]["inside"] or exception
            if exception:
                yield f"and {cell['covered_inside']:.2f} of the FLOPs lie under"
    yield "at most 0.01 of the FLOPs lie under the exchange between groups"


@quoted
def test_memory_bytes_and_hidden_shares_of_a_sharded_optimizer():
    twins = {(x["size"], x["target"]): x for x in cells() if x["step"] == "D-Sync"}
    found = [x for x in cells() if x["step"] == SHARDED]
    for cell in found:
        twin = twins[cell["size"], cell["target"]]
        assert twin["covered_inside"] <= cell["covered_inside"] + 0.001
        assert cell["sent_between"] / twin["sent_between"] == pytest.approx(7 / 8, 1e-3)
        for line in cell["inside"]:
            before, after = line.split(" times, ")[1].split(" and ")
            assert before == after or "over host+fsdp" in line
    least = min(x["covered_between"] for x in found)
    yield f"At least {least:.2f} of its FLOPs lie"
    more = [x["more_memory"] for x in found]
    yield f"needs up to {-min(more):.1f} shards less memory than D-Sync, and"
    yield f"and {max(more):.1f} more for 7B on four hosts"
    (large,) = (x for x in found if x["more_memory"] > 0)
    assert (large["size"], large["groups"]) == ("7B", 4)
