"""
Tests that the library has no identifiers that collide with words of JAX, DDP or ZeRO.

Only identifiers are read, never prose: the words may be good English.
"""

import ast
import functools
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]

# Words that were replaced, and what is said now.
REPLACED = {
    "Beat": "ProcessReport",
    "Beside": "Grouped",
    "Board": "KeyValueStore",
    "Choice": "RankedConfig",
    "Contribution": "Message and Passengers",
    "FORMS": "COST_MODELS",
    "Given": "Arguments",
    "Groups": "Combined, and combine_threshold_bytes",
    "Halved": "ReduceScatterAllGather",
    "Learned": "Trainable",
    "Lifeline": "a connection of _liveness",
    "LocalStep": "Step and Settings",
    "Patrol": "Monitor",
    "Piece": "Segment of a program",
    "PiecewiseStep": "zero1_step",
    "Places": "Partition",
    "SharedState": "Common",
    "Trust": "FitQuality",
    "Way": "TrainConfig",
    "apart": "unravel",
    "arrivals": "valid",
    "beat": "report",
    "board": "store",
    "by_place": "by_shard",
    "condemn": "publish",
    "cut_axes": "data_axes_of",
    "has_arrived": "valid_in_step",
    "has_halves": "has_reduce_scatter",
    "in_place": "with_constraints",
    "joined": "ravel",
    "judge": "diagnose",
    "lifeline": "a connection of _liveness",
    "model_state_ahead": "predicted_model_state",
    "on_pieces": "on_partitions",
    "patrol": "monitor",
    "reshard": "checkpoint",  # as a package; jax.sharding.reshard is another
    "together": "combine_threshold_bytes, combined or combined_spec",
    "weave": "interleave",
}

ALLOWED = {("pipejax/checkpoint/_reshard.py", "reshard")}


def identifiers(text):
    """Returns the names that a module defines: of functions, classes and values."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def test_identifiers_are_names_defined_by_module():
    text = (
        "import together\ndef weave(apart):\n    '''In place.'''\n    joined = sum(x)"
    )
    assert identifiers(text) == {"weave", "apart", "joined"}


@functools.cache
def identifiers_by_module():
    return {
        path.relative_to(ROOT).as_posix(): identifiers(path.read_text())
        for path in (ROOT / "pipejax").rglob("*.py")
    }


@pytest.mark.parametrize("word", REPLACED)
def test_replaced_words_name_nothing(word):
    found = {path for path, names in identifiers_by_module().items() if word in names}
    allowed = {path for path, name in ALLOWED if name == word}
    assert found - allowed == set(), f"say {REPLACED[word]}"
