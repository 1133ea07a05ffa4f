"""Tests that drawings of the documents are readable: texts do not overlap."""

import itertools
import xml.etree.ElementTree as ElementTree

import pytest

from .command import ROOT

SVG = "{http://www.w3.org/2000/svg}"
DRAWINGS = sorted((ROOT / "docs").glob("*.svg"))
# The width of a letter over the size of the font: of a wide sans-serif face.
LETTER, BOLD, MONOSPACE = 0.56, 0.62, 0.61
INHERITED = {"font-size": "14", "font-weight": "", "font-family": "", "text-anchor": ""}


def texts(node, inherited=INHERITED):
    """Yields each text that is not turned, with its left, top, right and bottom."""
    style = {name: node.get(name, value) for name, value in inherited.items()}
    if node.tag == f"{SVG}text" and "transform" not in node.attrib:
        said = "".join(node.itertext())
        size, x, y = (
            float(v) for v in (style["font-size"], node.get("x"), node.get("y"))
        )
        bold = style["font-weight"] == "bold" or node.find(f"{SVG}tspan") is not None
        letter = MONOSPACE if style["font-family"] == "monospace" else LETTER
        width = len(said) * size * (BOLD if bold else letter)
        left = x - {"middle": width / 2, "end": width}.get(style["text-anchor"], 0)
        yield said, (left, y - 0.8 * size, left + width, y + 0.2 * size)
    for child in node:
        yield from texts(child, style)


def apart(a, b):
    return a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]


@pytest.mark.parametrize("path", DRAWINGS, ids=lambda path: path.stem)
def test_texts_of_drawings_are_apart_and_inside(path):
    root = ElementTree.parse(path).getroot()
    _, _, width, height = map(float, root.get("viewBox").split())
    found = list(texts(root))
    for said, (left, top, right, bottom) in found:
        assert 0 <= left <= right <= width, said
        assert 0 <= top <= bottom <= height, said
    for (one, a), (other, b) in itertools.combinations(found, 2):
        assert apart(a, b), (one, other)


@pytest.mark.parametrize(
    "path", [x for x in DRAWINGS if x.stem != "favicon"], ids=lambda path: path.stem
)
def test_drawings_have_a_title_and_a_ground_of_their_own(path):
    """The page behind a drawing may be dark."""
    root = ElementTree.parse(path).getroot()
    assert root.find(f"{SVG}title").text
    ground = root.find(f"{SVG}rect")
    assert (ground.get("fill"), ground.get("width")) == ("#ffffff", "760")
