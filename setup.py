"""The package's description: README.md, with links that work on the package index."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
about = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def absolute(link):
    """Puts the repository's address before a path; pictures have one of their own."""
    folder = "raw" if link[1].startswith("!") else "blob"
    return f"{link[1]}{about['urls']['Repository']}/{folder}/main/"


setup(
    long_description=re.sub(
        r"(!?\[[^]]*\]\()(?!https?:|#)", absolute, (ROOT / "README.md").read_text()
    ),
    long_description_content_type="text/markdown",
)
