"""Tests that the document on sharded models shows the results of its experiments."""

import statistics

import pytest

from experiments.sharded import cluster, compiled, nanogpt

from .results import assert_shown, lines, result

SHARDED = "K=2, ZeRO-1"


def rows_of_compiled():
    return lines(compiled.rows(result("sharded_compiled")["cells"]))


def rows_of_cluster():
    record = result("sharded_cluster")
    return lines(cluster.rows(record["cells"], record["rate"]))


def words_on_memory():
    """Yields by how many shards a delay exceeds a synchronous step."""
    cells = result("sharded_compiled")["cells"]
    delayed = [x for x in cells if x["step"] in ("K=2", "K=2, plain", "K=2, int8")]
    tpus = [x["more_memory"] for x in delayed if x["target"].startswith("tpu")]
    yield f"On TPUs, it costs {min(tpus):.1f} to {max(tpus):.1f}."
    cells = [cell for cell in delayed if cell["target"].startswith("h100")]
    plain = [x["more_memory"] for x in cells if "int8" not in x["step"]]
    eight = [x["more_memory"] for x in cells if "int8" in x["step"]]
    yield (
        f"costs {min(plain):.1f} to {max(plain):.1f} shards more than D-Sync, and"
        f" {min(eight):.1f} to {max(eight):.1f} with eight bits"
    )


def rows_of_nanogpt():
    return lines(nanogpt.rows(result("sharded_nanogpt")["cells"]))


def words_on_nanogpt():
    """Yields how much more the loss is at K=2, as means over three seeds."""
    cells = result("sharded_nanogpt")["cells"]

    def of(*contender):
        return nanogpt.losses(cells, nanogpt.Contender(*contender))

    def pairs(optimizer, *devices):
        own, twin = of(optimizer, 2, *devices), of(optimizer, 1, 4, 1)
        assert own.keys() == twin.keys() == {0, 1, 2}
        return [own[seed] - twin[seed] for seed in own]

    def more(*contender):
        return statistics.mean(pairs(*contender))

    yield f"AdamW ends at {statistics.mean(of('adamw', 1, 4, 1).values()):.3f} nats"
    yield f"end {more('adamw', 4, 1):.3f} nats higher than at K=1"
    yield f"six sequences each end {more('adamw', 2, 2):.3f} nats higher"
    muon = more("muon", 4, 1)
    yield f"K=2 ends {abs(muon):.3f} nats {'higher' if muon > 0 else 'lower'}"
    alone, four = of("muon", 1, 1, 1), of("muon", 1, 4, 1)
    reach = (pairs("adamw", 4, 1), pairs("adamw", 2, 2))
    ends = (f"{min(each):.3f} to {max(each):.3f}" for each in reach)
    yield f"end {' and '.join(ends)} nats higher"
    yield f"to\n  {max(abs(alone[seed] - four[seed]) for seed in four):.3f} nats"


def words_on_two_hosts():
    (methods,) = (
        x["methods"] for x in result("sharded_cluster")["cells"] if x["hosts"] == 2
    )
    pipe, sync = (
        statistics.median(methods[name]["seconds"]) for name in ("Pipe-SGD", "D-Sync")
    )
    yield f"a pipelined step takes {pipe / sync:.2f} of the time of D-Sync"


def words_on_what_is_hidden():
    """Checks that the exchange is hidden, and that groups send what the twin sends."""
    for cell in result("sharded_compiled")["cells"]:
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


def words_on_a_sharded_optimizer():
    """Yields what it saves, and checks that its bytes and hidden shares are as said."""
    cells = result("sharded_compiled")["cells"]
    twins = {(x["size"], x["target"]): x for x in cells if x["step"] == "D-Sync"}
    found = [x for x in cells if x["step"] == SHARDED]
    for cell in found:
        twin = twins[cell["size"], cell["target"]]
        assert cell["covered_between"] >= 0.97
        assert twin["covered_inside"] - cell["covered_inside"] < 0.025
        assert 0.74 < cell["sent_between"] / twin["sent_between"] < 0.78
        for line in cell["inside"]:
            before, after = line.split(" times, ")[1].split(" and ")
            assert before == after or "over host+fsdp" in line
    less = [-x["more_memory"] for x in found]
    yield f"needs\n{min(less):.1f} to {max(less):.1f} shards less memory than D-Sync"


@pytest.mark.parametrize(
    "rows",
    [
        rows_of_compiled,
        rows_of_cluster,
        words_on_memory,
        rows_of_nanogpt,
        words_on_nanogpt,
        words_on_two_hosts,
        words_on_what_is_hidden,
        words_on_a_sharded_optimizer,
    ],
)
def test_figures_equal_the_result_files(rows):
    assert_shown("docs/sharded.md", rows())
