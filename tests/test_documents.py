"""README and docs: their code runs, their names exist, all public names are there."""

import importlib
import pathlib
import re
import subprocess
import sys

import pytest

import pipejax as pj

ROOT = pathlib.Path(__file__).parents[1]
WITH_CODE = [
    "README.md",
    "docs/getting_started.md",
    "docs/own_loop.md",
    "docs/coming_from_linen.md",
    "docs/coming_from_nnx.md",
    "docs/coming_from_equinox.md",
    "docs/coming_from_pmap.md",
    "docs/overlap.md",
    "docs/compression.md",
    "docs/timing.md",
    "docs/convergence.md",
]
RUN_ELSEWHERE = [
    "docs/many_hosts.md",  # tests/launch/test_script.py
    "docs/training_loop.md",  # tests/test_training_loop.py
]


def fences(path, language):
    text = (ROOT / path).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("path", WITH_CODE)
def test_code_runs_from_top_to_bottom(path):
    code = "\n".join(fences(path, "python"))
    assert code
    if "import equinox" in code:
        pytest.importorskip("equinox")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_every_document_with_code_is_run():
    documents = [ROOT / "README.md", *(ROOT / "docs").glob("**/*.md")]
    with_code = {str(p.relative_to(ROOT)) for p in documents if fences(p, "python")}
    assert with_code == {*WITH_CODE, *RUN_ELSEWHERE}


def documented():
    return set(re.findall(r"^\| `([\w.]+)`", (ROOT / "docs/api.md").read_text(), re.M))


MODULES = [
    *("codecs", "collectives", "corrections", "launch", "overlap"),
    *("problems", "stability", "timing", "transforms"),
]


def public():
    """Names in `pj`, and in the modules that it offers."""
    files = {p.stem for p in (ROOT / "pipejax").iterdir()}
    names = {name for name in vars(pj) if not name.startswith("_")} - files
    for module in MODULES:
        inside = vars(getattr(pj, module))
        names |= {f"{module}.{name}" for name in inside if not name.startswith("_")}
    return {f"pj.{name}" for name in names}


def test_every_public_name_is_documented():
    assert {n for n in documented() if n.startswith("pj.")} == public()


def test_every_documented_name_exists_and_says_what_it_is():
    for name in documented():
        module, _, attribute = name.replace("pj.", "pipejax.").rpartition(".")
        assert getattr(importlib.import_module(module), attribute).__doc__, name


def test_shell_commands_are_targets_of_the_makefile():
    makefile = (ROOT / "Makefile").read_text()
    for path in ("README.md", "CONTRIBUTING.md"):
        for line in "".join(fences(path, "sh")).splitlines():
            command = line.split("#")[0].strip()
            if command.startswith("make "):
                assert f"\n{command.removeprefix('make ')}:" in makefile
            else:
                assert command in makefile


def test_links_lead_somewhere():
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
            if not link.startswith("http"):
                assert (path.parent / link).exists(), f"{path.name}: {link}"
