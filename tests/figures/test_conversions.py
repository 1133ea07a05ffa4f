"""Tests the results on public programs, and what the document says of them."""

from experiments.report import result

from .quoted import quoted_in

RECORD = result("conversions")
PROGRAMS = RECORD["programs"]
WIDTHS = [row[width] for row in PROGRAMS.values() for width in ("width 1", "width 2")]


def test_differences_come_from_rounding():
    for found in WIDTHS:
        assert found["params"] <= found["rounding"]["params"]
        last_places = 2 * found.get("unit", 0)  # where rounding happens to change none
        assert found["reported"] <= max(3 * found["rounding"]["reported"], last_places)


def test_differences_tell_the_widths_apart():
    for name, row in PROGRAMS.items():
        for width in ("width 1", "width 2"):
            assert 90 * row[width]["params"] < row["apart"], name


@quoted_in("docs/benchmarks/optimizers.md")
def test_words_quote_the_result():
    lines = {name: len(row["changed"]) for name, row in PROGRAMS.items()}
    players = [lines.pop("jax-gans: DCGAN"), lines.pop("CleanRL: TD3")]
    gan = PROGRAMS["jax-gans: DCGAN"]
    yield f"needs {min(lines.values())} to {max(lines.values())} lines"
    yield f"DCGAN and TD3, need {players[0]} and {players[1]}"
    yield f"are {gan['apart']:.2f} apart"
    yield f"train for {RECORD['steps']} steps"
