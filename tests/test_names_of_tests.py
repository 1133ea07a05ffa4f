"""
Tests that the name of each test says what is tested, and what is expected.

Names have the form `test_<subject>_<behaviour>`, such as
`test_rates_without_bit_are_rejected`.
"""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]

ARTICLES = {"a", "an", "the"}

PRONOUNS = {
    *("he", "it", "itself", "she", "them", "themselves", "they", "we", "you"),
    *("nobody", "none", "nothing", "one", "ones"),
    *("such", "that", "these", "this", "those"),
    *("what", "whatever", "which", "whichever", "who", "whoever", "whom", "whose"),
}

PREPOSITIONS = {
    *("after", "among", "at", "before", "behind", "beside", "between", "by", "for"),
    *("from", "in", "inside", "into", "of", "on", "over", "to", "under", "with"),
    "without",
}

CONJUNCTIONS = {"as", "how", "if", "not", "only", "so", "than", "when", "where"}

# A name begins with its subject.
NEVER_FIRST = ARTICLES | PRONOUNS | PREPOSITIONS | CONJUNCTIONS

# After the subject, "one" may be a number and "none" a value.
NEVER = PRONOUNS - {"none", "nothing", "one", "such"}

LONGEST = 70  # letters, with `test_`


def faults(name):
    """Returns what is wrong with the name of a test, in words."""
    first, *others = name.removeprefix("test_").split("_")
    found = [f"begins with {first!r}"] if first in NEVER_FIRST else []
    found += [f"has the word {word!r}" for word in others if word in NEVER]
    if len(others) < 2:
        found.append("has fewer than three words")
    if len(name) > LONGEST:
        found.append(f"has more than {LONGEST} letters")
    return found


def names(text):
    """Returns the names of the tests in a module, in the order of `ast.walk`."""
    return [
        node.name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("test_rates_without_bit_are_rejected", []),
        ("test_int8_sends_one_byte_an_element", []),
        ("test_it_is_stopped", ["begins with 'it'"]),
        ("test_a_norm_is_added", ["begins with 'a'"]),
        ("test_of_all_rows_the_best", ["begins with 'of'"]),
        ("test_keys_that_are_integers", ["has the word 'that'"]),
        ("test_bad_flags", ["has fewer than three words"]),
        ("test_state_is_" + 70 * "x", ["has more than 70 letters"]),
    ],
)
def test_faults_of_a_name_are_found(name, wanted):
    assert faults(name) == wanted


def test_names_of_tests_are_read_from_functions_and_methods():
    text = "def test_b(): pass\nclass A:\n  def test_c(self): pass\ndef helper(): pass"
    assert names(text) == ["test_b", "test_c"]


def test_every_test_is_named_by_subject_and_behaviour():
    """The remedy is a name that begins with its subject and ends with a result."""
    found = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        for name in names(path.read_text()):
            if reasons := faults(name):
                found[f"{path.relative_to(ROOT)}::{name}"] = reasons
    assert found == {}
