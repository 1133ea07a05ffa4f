"""Tests that wheel and sdist hold the library, and that the core runs the README."""

import re
import sys
import tarfile
import venv
import zipfile

import pytest

from .command import ROOT, run

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Returns a folder with the wheel and sdist of a clean copy of the files in git."""
    copy = tmp_path_factory.mktemp("copy")
    files = run("git", "ls-files", "-co", "--exclude-standard", cwd=ROOT).splitlines()
    for name in files:
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", out, copy, cwd=copy)
    return out


def test_wheel_holds_library_without_tests_and_sdist_holds_more(built):
    """The wheel holds the library, its types and no tests; the sdist holds more."""
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    inside = set(zipfile.ZipFile(wheel).namelist())
    library = {str(p.relative_to(ROOT)) for p in (ROOT / "pipejax").rglob("*.py")}
    assert library | {"pipejax/py.typed"} <= inside
    assert {name.split("/")[0].split("-")[0] for name in inside} == {"pipejax"}
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
    assert library | {"README.md", "LICENSE", "pyproject.toml"} <= names


def test_links_work_on_the_package_index(built):
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("/METADATA"))
        metadata = archive.read(name).decode()
    links = re.findall(r"\]\(([^)]+)\)", metadata)
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", metadata)
    assert len(links) > 20
    assert pictures
    assert all(link.startswith("https://") for link in links)
    assert all("/raw/main/docs/" in picture for picture in pictures)


def test_core_install_runs_the_readme_code(built, tmp_path):
    """Installs the wheel in a fresh environment, and runs from an empty folder."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv/bin/python"
    (wheel,) = built.glob("*.whl")
    run(python, "-m", "pip", "install", "--quiet", wheel, cwd=tmp_path)
    readme = (ROOT / "README.md").read_text()
    code = re.findall(r"^```python\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    empty = tmp_path / "empty"
    empty.mkdir()
    run(python, "-c", "\n".join(code), cwd=empty)
    said = run(tmp_path / "venv/bin/pipejax", "--version", cwd=empty)
    assert said.startswith("pipejax 0.")
