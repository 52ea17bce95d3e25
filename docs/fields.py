"""Write docs/config.md: every field of ViTConfig, the stems and BiTConfig, from the text under it in the source.

python docs/fields.py
"""

import ast
from pathlib import Path
from types import ModuleType

from vitral.model import bit_config, config

PAGE = Path(__file__).parent / "config.md"
CLASSES: dict[ModuleType, tuple[str, ...]] = {
    config: ("ViTConfig", "ResNetStem", "ConvStem"),
    bit_config: ("BiTConfig",),
}
INTRODUCTION = """# Every field of a network

`docs/fields.py` generates this page from `src/vitral/model/config.py` and `bit_config.py`.

On the command line, write `--network.depth 4`, and commas between several numbers (`--network.stages 1,1,1,1`). In
TOML, write them into `[network]`."""


def make_page() -> str:
    """Return the page as Markdown."""
    sections = [INTRODUCTION]
    for module, names in CLASSES.items():
        source = Path(str(module.__file__)).read_text(encoding="utf-8")
        classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
        sections += [make_table(classes[name]) for name in names]
    return "\n\n".join(sections) + "\n"


def make_table(node: ast.ClassDef) -> str:
    """Return the section of a class: its docstring and a table of its fields."""
    lines = [f"## {node.name}", "", one_line(ast.get_docstring(node) or ""), "", "| field | default | description |"]
    lines.append("|---|---|---|")
    for field, text in zip(node.body, node.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            default = f"`{ast.unparse(field.value)}`" if field.value else "set by the name"
            description = one_line(ast.literal_eval(text.value))
            lines.append(f"| `{ast.unparse(field.target)}` | {default} | {description} |")
    return "\n".join(lines)


def one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(make_page(), encoding="utf-8")
