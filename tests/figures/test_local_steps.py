"""Tests what the document on local steps says about accuracy."""

import statistics

from experiments.local_steps._learn import known_as, local, of_seeds
from experiments.report import result

from .quoted import quoted_in


@quoted_in("docs/local_steps.md")
def test_hidden_exchange_ends_near_one_at_once():
    cells = result("local_steps_accuracy")["cells"]

    def loss(method):
        runs = of_seeds(cells, known_as("shakespeare", "adamw", 1000, method))
        assert {run["seed"] for run in runs} == {0, 1, 2}
        return statistics.mean(run["test_loss"] for run in runs)

    later = [loss(local(h, h)) - loss(local(h, 0)) for h in (4, 16, 64)]
    yield f"A hidden exchange ends at most {max(later):.3f} nats behind one at once"
