"""Writes docs/config.md: every field of ViTConfig, of the stems and of BiTConfig, from the text under it in the source.

python docs/fields.py
"""

import ast
from pathlib import Path

from vitral.model import bit_config, config

PAGE = Path(__file__).parent / "config.md"
CLASSES = {config: ("ViTConfig", "ResNetStem", "ConvStem"), bit_config: ("BiTConfig",)}


def make_page() -> str:
    parts = [
        "# Every choice of a network\n\nMade by `docs/fields.py` from `src/vitral/model/config.py` and `bit_config.py`."
    ]
    parts.append(
        "On the command line: `--network.depth 4`, with commas for several numbers (`--network.stages 1,1,1,1`). In "
        "TOML: `[network]`."
    )
    for module, names in CLASSES.items():
        source = Path(str(module.__file__)).read_text(encoding="utf-8")
        classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
        parts += [make_table(classes[name]) for name in names]
    return "\n\n".join(parts) + "\n"


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
