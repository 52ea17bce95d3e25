"""Writes docs/config.md: every field of ViTConfig and of the stems, from the text under it in the source.

python docs/fields.py
"""

import ast
from pathlib import Path

from vitral.model import config

PAGE = Path(__file__).parent / "config.md"
CLASSES = ("ViTConfig", "ResNetStem", "ConvStem")


def make_page() -> str:
    source = Path(config.__file__).read_text(encoding="utf-8")
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    head = "# Every choice of a network\n\nMade by `docs/fields.py` from `src/vitral/model/config.py`."
    return "\n\n".join([head, *(make_table(classes[name]) for name in CLASSES)]) + "\n"


def make_table(node: ast.ClassDef) -> str:
    lines = [f"## {node.name}", "", one_line(ast.get_docstring(node) or ""), "", "| field | default | what it is |"]
    lines.append("|---|---|---|")
    for field, text in zip(node.body, node.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            default = f"`{ast.unparse(field.value)}`" if field.value else "set by the name"
            help_text = one_line(ast.literal_eval(text.value))
            lines.append(f"| `{ast.unparse(field.target)}` | {default} | {help_text} |")
    return "\n".join(lines)


def one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(make_page(), encoding="utf-8")
