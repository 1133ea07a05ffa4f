"""Tests what the documents say about the accuracy and the time of local steps."""

import statistics

from experiments.report import result

from .quoted import column, quoted_in


@quoted_in("docs/local_steps.md")
def test_costs_of_rounds_are_quoted():
    adamw = column("local_steps.accuracy", "V = H", "shakespeare, adamw")
    muon = column("local_steps.accuracy", "at once", "shakespeare, muon")
    for one, other in zip(adamw, muon, strict=True):
        assert 0.4 < other / one < 0.65
    yield "Under Muon, which was measured on the first, they cost half as much"
    nanogpt = column("local_steps.accuracy", "V = H", "nanogpt, adamw")
    four, sixteen, most = zip(adamw, nanogpt, strict=True)
    yield "rounds of 4 cost {:.2f} and {:.2f} nats".format(*four)
    (both,) = {f"{cost:.2f}" for cost in sixteen}
    yield f"rounds of 16 cost {both} on both"
    yield "rounds of 64 cost {:.2f} and {:.2f}".format(*most)
    images = column("local_steps.accuracy", "V = H", "cifar10, adamw")
    yield "On CIFAR-10, they cost {:.2f}, {:.2f} and {:.2f} nats".format(*images)


@quoted_in("docs/benchmarks/accuracy_sharded.md")
def test_hidden_exchange_costs_no_more_than_one_at_once():
    tasks = "shakespeare, adamw", "shakespeare, muon", "cifar10, adamw"
    for row in (*tasks, "nanogpt, adamw"):
        costs = (column("local_steps.accuracy", x, row) for x in ("V = H", "at once"))
        for hidden, at_once in zip(*costs, strict=True):
            assert hidden < at_once + 0.006
    yield "With V = H, a hidden exchange costs nothing beyond that of one at once"
    for row in (*tasks, "nanogpt, adamw", "mnist, adamw"):
        plain = column("local_steps.accuracy", "V = H", row)
        for codec in ("int8", "int4"):
            coded = column("local_steps.accuracy", f"V = H, {codec}", row)
            assert all(a < b + 0.005 for a, b in zip(coded, plain, strict=True))
    yield "int8 and int4 cost nothing more"


@quoted_in("docs/local_steps.md")
def test_gains_of_hiding_are_quoted():
    gains = [-gain for gain in column("local_steps.equal_time", "change by hiding")]
    assert min(gains) >= 0.03
    yield "they end {:.2f}, {:.2f} and {:.2f} nats lower".format(*gains[:3])
    yield "(under Muon {:.2f}, {:.2f} and {:.2f})".format(*gains[3:])


@quoted_in("docs/benchmarks/accuracy_sharded.md")
def test_costs_of_one_chunk_are_quoted():
    def more(row):
        one, at_once = (
            column("local_steps.accuracy", x, row)[0] for x in ("V = 1", "at once")
        )
        return one - at_once

    tasks = "shakespeare, adamw", "nanogpt, adamw", "cifar10, adamw"
    yield (
        "V = 1 costs {:.2f} nats more on text, {:.2f} on nanogpt and {:.2f} on CIFAR-10"
    ).format(*map(more, tasks))
    yield f"under Muon it costs {more('shakespeare, muon'):.3f}"


@quoted_in("docs/benchmarks/accuracy_sharded.md")
def test_costs_on_images_are_quoted():
    images = column("local_steps.accuracy", "V = H", "cifar10, adamw")
    costs = [
        cost
        for title in ("at once", "V = H", "V = H, int8", "V = H, int4")
        for cost in column("local_steps.accuracy", title, "mnist, adamw")
    ]
    yield (
        "On CIFAR-10, they cost {:.2f}, {:.2f} and {:.2f} nats, and on MNIST about"
        " {:.2f} at most"
    ).format(*images, max(costs))


# The bytes of a round, relative to those without a codec.
BYTES = {"local, hidden": 1, "local, hidden, int8": 0.26, "local, hidden, int4": 0.15}


@quoted_in("docs/benchmarks/speed.md")
def test_hosts_compute_where_exchanges_fit_twice():
    shares = []
    for cell in result("local_steps_cluster")["cells"]:
        for name, size in BYTES.items():
            if 2 * size * cell["exchange"] <= cell["compute"]:
                pairs = zip(*map(cell["seconds"].get, ("compute", name)), strict=True)
                shares.append(statistics.median(a / b for a, b in pairs))
    assert len(shares) > 8
    assert round(min(shares), 2) >= 0.95
    yield "fits twice into its round, hosts compute for at least 0.95 of the time"


@quoted_in("docs/benchmarks/schedules.md")
def test_memory_of_local_steps_is_quoted():
    cells = result("local_steps_compiled")["cells"]
    coded = [cell for cell in cells if cell["step"] == "mean, int8"]
    above = {cell["model"]: cell["more_memory"] - cell["bar"] for cell in coded}
    whole = [more for model, more in above.items() if "in groups" not in model]
    assert max(more for model, more in above.items() if "in groups" in model) <= 0
    most = f"{max(whole):.2f}"
    yield f"where groups shard the model, and up to {most} copies above it elsewhere"
