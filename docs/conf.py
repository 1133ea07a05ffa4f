"""How Sphinx builds the site: `make docs`."""

import argparse
import os
import re
import tomllib
from pathlib import Path

import latex2mathml.converter
from docutils import nodes
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).parents[1]
_about = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REPOSITORY = _about["urls"]["Repository"]

# The tutorials run on CPUs: JAX would look for the accelerators whose compilers are
# installed.
os.environ["JAX_PLATFORMS"] = "cpu"

project = html_title = "pipejax"
copyright = "the pipejax authors"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
nitpicky = True  # a name that is nowhere fails the build
# Types of other libraries, and our private ones.
nitpick_ignore_regex = [
    ("py:.*", r"(?!pipejax\.).*"),
    ("py:.*", r"pipejax\..*\._.*|pipejax\.shards\..*|.*\.Any\w+"),
]

html_theme = "furo"
html_favicon = "favicon.svg"
html_theme_options = {"source_repository": REPOSITORY, "source_branch": "main"}
html_math_renderer = "mathml"  # which browsers show without a script

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
nb_execution_mode = "cache"
nb_execution_cache_path = str(ROOT / "build/notebooks")
nb_execution_raise_on_error = True
nb_execution_timeout = 600
nb_merge_streams = True

# Docstrings are Markdown's: `code`, and equations between $$.
default_role = "code"
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 80
napoleon_use_ivar = True


# Code in docstrings and pages has straight quotation marks.
smartquotes = False


def plural(found):
    """Returns code as Sphinx needs it before a letter, as in `Array`s."""
    code, letter = found.groups()
    return f"{code}\\ {letter}" if letter else code


def from_markdown(app, what, name, obj, options, lines):
    """Turns equations between $$, indented code and plurals of code into Sphinx's."""
    text = re.sub(
        r"^( *)\$\$(.+?)\$\$$",
        lambda m: f"{m[1]}.. math:: {m[2]}".replace("\n", f"\n{m[1]}   "),
        "\n".join(lines),
        flags=re.MULTILINE | re.DOTALL,
    )
    # Code follows a colon, and is indented by four spaces more.
    text = re.sub(
        r"^( *)(\S.*):\n\n(?=\1    [^\s$>-])", r"\1\2::\n\n", text, flags=re.MULTILINE
    )
    text = re.sub(r"(`+[^`\n]+`+)(\w?)", plural, text)
    lines[:] = text.split("\n")


def outward(app, docname, source):
    """Leads links to files outside of docs/ to the repository."""
    up = r"\.\./" * (1 + docname.count("/"))
    source[0] = re.sub(rf"\]\({up}", f"]({REPOSITORY}/blob/main/", source[0])


def included(app, path, docname, source):
    """Does the same for README, CONTRIBUTING and CHANGELOG, which lie outside."""
    inside = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
    for name, page in inside.items():
        source[0] = source[0].replace(f"]({name})", f"]({page})")
    source[0] = source[0].replace("](docs/", "](")
    source[0] = re.sub(
        r"\]\((?=experiments/|tests/|pipejax/|Makefile|CITATION)",
        f"]({REPOSITORY}/blob/main/",
        source[0],
    )


def visit_math(translator, node):
    """Writes an equation as MathML."""
    display = "block" if isinstance(node, nodes.math_block) else "inline"
    equation = latex2mathml.converter.convert(node.astext(), display=display)
    translator.body.append(equation)
    raise nodes.SkipNode


class Command(SphinxDirective):
    """Shows the description, the arguments and the example of a command of `pipejax`.

    The text is that of `pipejax COMMAND --help`.
    """

    required_arguments = 1

    def run(self):
        """Returns the nodes of the command."""
        from pipejax.cli._main import _COMMANDS  # imports JAX, which reads os.environ

        commands = argparse.ArgumentParser("pipejax").add_subparsers()
        for command in _COMMANDS:
            command.add(commands)
            self.env.note_dependency(command.__file__)
        parser = commands.choices[self.arguments[0]]
        arguments = [_argument(x) for x in parser._actions if x.dest != "help"]
        example = parser.epilog.partition("\n")[2].strip()
        return [
            *(_paragraph(text) for text in parser.description.split("\n\n")),
            nodes.definition_list("", *arguments),
            nodes.literal_block(example, example, language="bash"),
        ]


def _argument(action):
    """Returns an argument of a command with its help text."""
    option = action.option_strings
    value = action.metavar or (action.dest.upper() if option else action.dest)
    more = {0: [], "*": [value, "..."], "+": [value, "..."]}
    name = " ".join([*option, *more.get(action.nargs, [value])])
    says = action.help.replace("%%", "%")  # as argparse prints it
    if action.choices:
        says += f"; one of {', '.join(action.choices)}"
    if action.required and option:
        says += "; required"
    term = nodes.term("", "", nodes.literal(name, name))
    return nodes.definition_list_item(
        "", term, nodes.definition("", _paragraph(f"{says[0].upper()}{says[1:]}."))
    )


def _paragraph(text):
    """Returns a paragraph in which options, and what backticks enclose, are code."""
    parts = enumerate(re.split(r"`([^`]+)`|(--[a-z-]+)", text))
    inline = [nodes.literal(x, x) if i % 3 else nodes.Text(x) for i, x in parts if x]
    return nodes.paragraph("", "", *inline)


def setup(app):
    """Connects what is defined above."""
    app.add_directive("command", Command)
    app.connect("autodoc-process-docstring", from_markdown)
    app.connect("source-read", outward)
    app.connect("include-read", included)
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math, None))
