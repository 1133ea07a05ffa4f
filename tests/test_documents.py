"""Tests that the documents' code runs, and that they document all public names."""

import ast
import importlib.util
import inspect
import pydoc
import re
import shlex

import pytest

import pipejax as pj
from pipejax.cli import main
from pipejax.cli._main import _COMMANDS

from .command import ROOT, run_python
from .launch.helpers import free_port

WITH_CODE = [
    "README.md",
    "docs/getting_started.md",
    "docs/own_loop.md",
    "docs/checkpoints.md",
    "docs/coming_from_ddp.md",
    "docs/coming_from_linen.md",
    "docs/coming_from_nnx.md",
    "docs/coming_from_equinox.md",
    "docs/coming_from_pmap.md",
    "docs/overlap.md",
    "docs/reference/codecs.md",
    "docs/reference/collectives.md",
    "docs/loss.md",
    "docs/sharded.md",
    "docs/sharded_optimizer.md",
    "docs/local_steps.md",
    "docs/compression.md",
    "docs/timing.md",
    "docs/convergence.md",
    "docs/recipes.md",
]
SLOW = [
    "docs/coming_from_nnx.md",  # tests/flax/test_nnx.py trains such a model
    "docs/coming_from_equinox.md",
    "docs/coming_from_linen.md",
    "docs/coming_from_pmap.md",
    "docs/compression.md",
    "docs/timing.md",
    "docs/convergence.md",
    "docs/coming_from_ddp.md",
    "docs/loss.md",  # tests/train_step has such losses
    "docs/checkpoints.md",  # tests/checkpoint restores such states
    "docs/overlap.md",  # tests/overlap has such a program
    "docs/sharded_optimizer.md",  # tests/core/step/test_zero1.py has such a step
    "docs/recipes.md",
]
RUN_ELSEWHERE = [
    "docs/many_hosts.md",  # tests/launch/test_script.py
    "docs/training_loop.md",  # tests/test_training_loop.py
]


def fences(path, language):
    text = (ROOT / path).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(
    "path",
    [pytest.param(x, marks=pytest.mark.full) if x in SLOW else x for x in WITH_CODE],
)
def test_documents_run_from_top_to_bottom(path):
    blocks = fences(path, "python")
    if importlib.util.find_spec("grain") is None:
        blocks = [block for block in blocks if "grain." not in block]
    code = "\n".join(blocks)
    assert code
    if "import equinox" in code:
        pytest.importorskip("equinox")
    run_python(code)


@pytest.mark.parametrize("path", WITH_CODE + RUN_ELSEWHERE)
def test_code_of_documents_calls_pipejax_by_its_names(path):
    """The quick run does not run slow documents, but every name in them exists."""
    found = list(uses("\n".join(fences(path, "python"))))
    assert found
    for name, arguments in found:
        value = pydoc.locate(name)
        assert value is not None, name
        if arguments:
            known = inspect.signature(value).parameters.values()
            if not any(x.kind is x.VAR_KEYWORD for x in known):
                assert arguments <= {x.name for x in known}, name


def uses(code):
    """Yields the names of pipejax in code, with the arguments that a call names."""
    tree = ast.parse(code)
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {x.asname or x.name: x.name for x in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {x.asname or x.name: f"{node.module}.{x.name}" for x in node.names}
    for node in ast.walk(tree):
        called = isinstance(node, ast.Call)
        first, _, rest = ast.unparse(node.func if called else node).partition(".")
        name = f"{names.get(first)}.{rest}".removesuffix(".")
        if re.fullmatch(r"pipejax(\.\w+)+", name):
            yield name, {x.arg for x in node.keywords if x.arg} if called else set()


def test_pytorch_code_of_the_ddp_page_runs():
    """Runs the code as the only process of a job. The mark "py" sets it apart."""
    pytest.importorskip("torch")
    code = "\n".join(fences("docs/coming_from_ddp.md", "py"))
    assert "DistributedDataParallel" in code
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    run_python(code, **place, MASTER_PORT=str(free_port()))


def test_every_document_with_code_is_run():
    documents = [ROOT / "README.md", *(ROOT / "docs").glob("**/*.md")]
    with_code = {str(p.relative_to(ROOT)) for p in documents if fences(p, "python")}
    assert with_code == {*WITH_CODE, *RUN_ELSEWHERE}


def documented():
    """Returns the names on the pages of the reference, with their modules."""
    names = set()
    for page in (ROOT / "docs/reference").glob("*.md"):
        module = None
        for kind, name in re.findall(
            r"^\.\. ([\w:]+):: ([\w.]+)(?:\(\))?$", page.read_text(), re.M
        ):
            if kind == "currentmodule":
                module = name
            else:
                names.add(f"{module}.{name}")
    return names


def named(name):
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


MODULES = [
    *("codecs", "collectives", "launch", "overlap"),
    *("problems", "stability", "timing", "transforms"),
]


def public():
    """Returns the public names of `pipejax` and of its public modules."""
    files = {p.stem for p in (ROOT / "pipejax").iterdir()}
    names = {name for name in vars(pj) if not name.startswith("_")} - files
    for module in MODULES:
        inside = vars(getattr(pj, module))
        names |= {f"{module}.{name}" for name in inside if not name.startswith("_")}
    return {f"pipejax.{name}" for name in names}


def test_every_public_name_is_documented():
    """A name may be documented under another name, as `pj.pipelined` is."""
    shown = {id(named(name)) for name in documented()}
    assert not {name for name in public() if id(named(name)) not in shown}


def test_every_documented_name_is_public_and_has_a_docstring():
    apart = ("pipejax.checkpoint.", "pipejax.flax.")  # these need extras
    for name in documented():
        assert name in public() or name.startswith(apart), name
        assert named(name).__doc__, name


def test_shell_commands_of_documents_are_in_the_makefile():
    makefile = (ROOT / "Makefile").read_text()
    for path in ("README.md", "CONTRIBUTING.md"):
        for line in "".join(fences(path, "sh")).splitlines():
            command = line.split("#")[0].strip()
            if command.startswith("make "):
                assert f"\n{command.removeprefix('make ')}:" in makefile
            else:
                assert command in makefile


def test_relative_links_of_documents_lead_to_files():
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for link in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
            if not link.startswith("http"):
                assert (path.parent / link).exists(), f"{path.name}: {link}"


def commands():
    """Yields the `pipejax` commands in the shell code of all pages."""
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        path = str(page.relative_to(ROOT))
        for line in "".join(fences(path, "(?:sh|bash)")).splitlines():
            words = shlex.split(line.split(" > ")[0], comments=True)
            words = words[1:] if words[:1] == ["srun"] else words
            if words[:1] == ["pipejax"]:
                yield pytest.param(words[1:], id=f"{path}: {line}")


@pytest.mark.parametrize("words", list(commands()))
def test_commands_in_documents_can_be_parsed(words, monkeypatch):
    for command in _COMMANDS:
        monkeypatch.setattr(command, "run", lambda args: 3)
    assert main(words) == 3


def test_every_command_is_in_the_reference():
    """The page names the commands, and docs/conf.py adds their help texts."""
    page = (ROOT / "docs/reference/cli.md").read_text()
    names = [command.EXAMPLE.split("pipejax ")[1].split()[0] for command in _COMMANDS]
    assert re.findall(r"^```{command} (\S+)$", page, re.M) == names
