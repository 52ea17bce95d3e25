"""Configure Sphinx: Markdown pages, the API from docstrings, no resource from outside.

make docs
"""

import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

project = "vitral"
author = "the vitral authors"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "vitral"
smartquotes_action = "qe"  # keep the hyphens of --options
html_copy_source = False
html_show_search_summary = False  # a page on a disk may not fetch others
html_show_sourcelink = False
html_show_sphinx = html_show_copyright = False
html_math_renderer = "mathml"
html_static_path = ["style"]
html_css_files = ["site.css"]
html_js_files = ["access.js"]
templates_path = ["templates"]
pygments_style, pygments_dark_style = "default", "monokai"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "signature"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
MAX_SHORT = 16
"""Code of at most this many characters is not broken in a table."""
ONE_LINE = re.compile(
    r"(?<=\d) (?=(%|px|GiB|MiB|±|x)(\W|$))|(?<=±) (?=\d)|(?<=\d x) (?=\d)|(?<=\d) (?=to [+-]?\d)|(?<=\d to) (?=[+-]?\d)"
)
"""The spaces of 91.3 %, 31.34 ± 0.21, 224 x 224 and 87.2 to 92.0 %."""


def setup(app: Sphinx) -> None:
    """Register the math renderer, the reader of docstrings, and the line breaks of tables."""
    app.add_html_math_renderer("mathml", (write_inline_math, None), (write_display_math, None))
    app.connect("autodoc-process-docstring", read_docstring)
    app.connect("doctree-read", set_line_breaks)


def set_line_breaks(app: Sphinx, document: nodes.document) -> None:
    """In tables, keep a number with its unit or its deviation, and short code in one line."""
    for cell in document.findall(nodes.entry):
        for text in list(cell.findall(nodes.Text)):
            if isinstance(text.parent, nodes.literal):
                text.parent["classes"] += ["short"] if len(text) <= MAX_SHORT else []
            else:
                joined = ONE_LINE.sub("\N{NO-BREAK SPACE}", text)
                text.parent.replace(text, nodes.Text(joined))


def write_inline_math(writer: Any, node: nodes.math) -> None:
    writer.body.append(convert(node.astext()))
    raise nodes.SkipNode


def write_display_math(writer: Any, node: nodes.math_block) -> None:
    writer.body.append(f'<div class="math">{convert(node.astext(), display="block")}</div>')
    raise nodes.SkipNode


def read_docstring(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Turn a docstring as vitral writes them into reStructuredText: code, parameters, and names in backticks."""
    converted: list[str] = []
    in_code = in_parameters = False
    for line in lines:
        previous = converted[-1] if converted else ""
        if line in ("Parameters", "Args:"):
            in_parameters = True
            converted += [".. rubric:: Parameters", ""]
        elif line.startswith("-----"):
            pass
        elif in_parameters:
            converted += read_parameter(line)
        elif line.startswith("    "):
            if not in_code and not previous:
                converted += [".. code-block:: python", ""]
            in_code = True
            converted.append(line)
        else:
            in_code = in_code and not line
            converted.append(re.sub(r"(?<![`:\w])`([^`]+)`(?!`)", r"``\1``", line))
    lines[:] = converted


def read_parameter(line: str) -> list[str]:
    """Return a line of the section Parameters as an entry of a list, or as its continuation."""
    match = re.match(r" {0,4}((?:\w+, )*\w+): (.*)", line)
    if match:
        names = ", ".join(f"**{name}**" for name in match[1].split(", "))
        return [f"* {names}: {match[2]}"]
    return [f"  {line.strip()}" if line.strip() else ""]
