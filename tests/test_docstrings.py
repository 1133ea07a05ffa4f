"""Tests that docstrings of public names are complete, and how many have examples."""

import ast
import dataclasses
import inspect
import re
import textwrap

import pytest

from .test_documents import named, public


def functions():
    """Returns the public functions and public methods of public classes, by name."""
    found = {}
    for name in sorted(public()):
        value = named(name)
        if inspect.isfunction(value):
            found[name] = value
        elif inspect.isclass(value):
            for attribute, member in vars(value).items():
                if inspect.isfunction(member) and not attribute.startswith("_"):
                    found[f"{name}.{attribute}"] = member
    return found


def classes():
    return {n: named(n) for n in sorted(public()) if inspect.isclass(named(n))}


def section(docstring, *titles):
    """Returns the text of a section, up to the next line that is not indented."""
    found = re.search(
        rf"^(?:{'|'.join(titles)}):\n((?:[ ]+.*\n|\n)*)", docstring + "\n", re.MULTILINE
    )
    return found[1] if found else ""


def entries(docstring, *titles):
    return set(re.findall(r"^  \*{0,2}(\w+):", section(docstring, *titles), re.M))


@pytest.mark.parametrize(("name", "function"), functions().items())
def test_docstrings_list_arguments_results_and_errors(name, function):
    docstring = inspect.getdoc(function)
    parameters = inspect.signature(function).parameters
    wanted = {p for p in parameters if p != "self" and not p.startswith("_")}
    # A docstring of one line can describe a single argument.
    if "\n" in docstring or len(wanted) > 1:
        assert wanted <= entries(docstring, "Args"), name
    first = docstring.split()[0]
    returned = inspect.signature(function).return_annotation
    nothing = (None, "None", inspect.Signature.empty)
    if returned not in nothing and not inspect.isgeneratorfunction(
        inspect.unwrap(function)
    ):
        assert first in ("Returns", "Yields") or section(docstring, "Returns"), name
    if _raises(function):
        assert section(docstring, "Raises"), name


# Functions of pipejax make these, and their fields are internals.
MADE_BY_FUNCTIONS = {"pipejax.TrainStep", "pipejax.LocalTrainStep"}


@pytest.mark.parametrize(("name", "cls"), classes().items())
def test_class_docstrings_list_all_attributes(name, cls):
    if name in MADE_BY_FUNCTIONS:
        assert not entries(inspect.getdoc(cls), "Attributes"), name
        return
    fields = getattr(cls, "_fields", ())
    if dataclasses.is_dataclass(cls):
        fields = [f.name for f in dataclasses.fields(cls) if not f.name.startswith("_")]
    docstring = inspect.getdoc(cls)
    assert set(fields) <= entries(docstring, "Attributes", "Args"), name


def _raises(function):
    """Returns whether the function itself raises, apart from functions inside it."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    pending = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Raise):
            return node.exc is not None
        if not isinstance(node, ast.FunctionDef | ast.Lambda | ast.ClassDef):
            pending += ast.iter_child_nodes(node)
    return False


ALGORITHMS = ("codecs", "collectives", "stability", "transforms")


def share(of, pattern):
    having = [name for name, value in of.items() if re.search(pattern, value.__doc__)]
    return len(having) / len(of)


def test_most_docstrings_have_examples_and_equations():
    plain = {name: f for name, f in functions().items() if name in public()}
    assert share(plain, r">>> ") >= 0.6
    algorithms = {n: f for n, f in plain.items() if n.split(".")[1] in ALGORITHMS}
    assert share(algorithms, r"\$\$") >= 0.6


# Names that implement a published method. All others are helpers, types, measurements,
# or methods of this library, whose derivation stands in their modules.
PUBLISHED = (
    *("make_train_step", "TrainStep", "make_local_step"),
    *("pipelined", "pipelined_mean"),
    *("predicted_params", "codecs.bf16", "codecs.error_feedback", "codecs.fp8"),
    *("codecs.int4", "codecs.int8", "codecs.power_sgd", "codecs.quantize"),
    *("codecs.random_k", "codecs.sign", "codecs.stochastic", "codecs.top_k"),
    *("codecs.acp_sgd", "codecs.fp4", "codecs.int2", "codecs.rotated"),
    *("codecs.truncate", "collectives.halving_doubling", "collectives.hierarchical"),
    *("collectives.in_rounds", "collectives.parameter_server", "collectives.ring"),
    *("collectives.tree", "collectives.two_shot", "overlap.least_delay"),
    "transforms.delay_robust",
    *("transforms.extrapolate_updates", "stability.max_curvature"),
    *("stability.max_learning_rate", "stability.sharpness"),
    *("stability.spectral_radius", "timing.duration", "timing.flat", "timing.fsdp"),
    *("timing.hierarchical", "timing.local_step_time", "timing.overlapped_step_time"),
    *("timing.pipelined_step_time", "timing.shard_optimizer"),
    *("timing.sharded_step_time", "timing.synchronous_step_time"),
)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_methods_have_references(name):
    """A reference has authors, a short title, the year, and a link."""
    found = section(inspect.getdoc(named(f"pipejax.{name}")), "References?")
    references = [" ".join(each.split()) for each in re.split(r"\n\n|(?<=\d)\n", found)]
    for each in filter(None, references):
        assert re.fullmatch(r"\w+ (et al\.|and \w+), .+ \d{4}, https://\S+", each), each
    assert any(references)


def test_all_references_are_on_the_list():
    having = {
        name
        for name in public()
        if section(inspect.getdoc(named(name)) or "", "References?")
    }
    listed = {id(named(f"pipejax.{name}")) for name in PUBLISHED}
    assert [name for name in having if id(named(name)) not in listed] == []
