"""Tests what the documents say about the accuracy of local steps."""

from .quoted import column, quoted_in


@quoted_in("docs/local_steps.md")
def test_costs_of_rounds_are_quoted():
    four, sixteen, most = column("local_steps.accuracy", "V = H")
    yield f"{four:.2f} nats with rounds of 4, {sixteen:.2f} with 16, and {most:.2f}"
