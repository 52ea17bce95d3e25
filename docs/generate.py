"""Write the reference pages that repeat the code: commands, settings, networks, checkpoints, recipes and events.

python docs/generate.py
"""

import ast
import contextlib
import io
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType

from vitral.cli.main import COMMANDS, main
from vitral.cli.models import model_row
from vitral.cli.train import list_settings
from vitral.model import bit_config, config
from vitral.model.sizes import NAMES
from vitral.report.text import format_bytes
from vitral.training import events
from vitral.weights.pretrained import PRETRAINED

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference"
NOTE = "<!-- docs/generate.py writes this page from the code. -->"
SECTIONS = {
    "": "General",
    "optim": "Optimizer and schedule",
    "loss": "Loss",
    "augment": "Augmentation",
    "mix": "Mixing",
    "tune": "Fine-tuning",
    "masking": "Masked patches",
}


# ---- commands ----


def make_commands() -> str:
    """Return the help page of every command."""
    sections = [
        "# Commands",
        NOTE,
        "Run `vitral COMMAND --help` for the same text, and `vitral train --help-all` for [every setting of a "
        "run](settings.md). Results go to standard output, progress to standard error. [Exit "
        "codes](exit-codes.md) lists the codes that scripts can rely on.",
    ]
    for group, commands in COMMANDS.items():
        sections.append(f"## {group}")
        for name in commands:
            sections.append(f"### vitral {name}\n\n```text\n{read_help(name)}\n```")
    return join(sections)


def read_help(command: str) -> str:
    """Return what `vitral COMMAND --help` prints in a terminal of 80 columns."""
    output, columns = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "80"
    try:
        with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
            main([command, "--help"])
    finally:
        del os.environ["COLUMNS"]
        if columns is not None:
            os.environ["COLUMNS"] = columns
    return "\n".join(line.rstrip() for line in output.getvalue().strip().splitlines())


# ---- settings ----


def make_settings() -> str:
    """Return a table of the settings of `vitral train` per section."""
    sections = [
        "# Settings of a run",
        NOTE,
        "A setting has one name everywhere. `optim.lr` is `--optim.lr 3e-4` on the command line, `lr` under "
        "`[optim]` in `--config my.toml`, and `optim=dict(lr=3e-4)` in Python (`lr=3e-4` for short). `from` is "
        "`from_` in Python.",
        "A later source overrides an earlier one: defaults, `--recipe NAME`, `--config FILE`, flags. `vitral "
        "train DATA --print-config` prints all of them as a TOML file. The value `auto` means that vitral "
        "chooses, prints the reason and stores the choice in `config.toml` of the run.",
    ]
    rows = list_settings()
    for section, title in SECTIONS.items():
        members = [row for row in rows if row[0].rpartition(".")[0] == section]
        table = [(f"`{name}`", show_default(default), one_line(text)) for name, default, text in members]
        sections.append(f"## {title}\n\n{make_table(('setting', 'default', 'meaning'), table)}")
    sections.append(
        "## Network\n\n`network.FIELD` changes any [field of the network](network.md): `--network.pool mean`. Set "
        "`image_size`, `channels`, `dropout` and `drop_path` as settings of their own. The dataset defines "
        "`num_classes`."
    )
    return join(sections)


def show_default(value: object) -> str:
    if value in ("", None):
        return ""
    values = value if isinstance(value, tuple) else (value,)
    text = ", ".join(f"{number:.3g}" if isinstance(number, float) else str(number) for number in values)
    return f"`{text.lower() if isinstance(value, bool) else text}`"


# ---- networks ----


def make_network() -> str:
    """Return the fields of ViTConfig, the stems and BiTConfig, from the text under each field."""
    classes: dict[ModuleType, tuple[str, ...]] = {
        config: ("ViTConfig", "ResNetStem", "ConvStem"),
        bit_config: ("BiTConfig",),
    }
    sections = [
        "# Fields of a network",
        NOTE,
        "In Python, pass them to `vitral.create` or `vitral.load`. On the command line, write `--network.depth "
        "4`, with commas between several numbers (`--network.stages 1,1,1,1`). In TOML, put them under "
        "`[network]`.",
    ]
    for module, names in classes.items():
        nodes = read_classes(module)
        sections += [make_fields(nodes[name]) for name in names]
    return join(sections)


def read_classes(module: ModuleType) -> dict[str, ast.ClassDef]:
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    return {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}


def make_fields(node: ast.ClassDef) -> str:
    """Return the section of a class: its docstring and a table of its fields."""
    rows = []
    for field, text in zip(node.body, node.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            default = f"`{ast.unparse(field.value)}`" if field.value else "set by the name"
            rows.append((f"`{ast.unparse(field.target)}`", default, one_line(ast.literal_eval(text.value))))
    table = make_table(("field", "default", "description"), rows)
    return f"## {node.name}\n\n{one_line(ast.get_docstring(node) or '')}\n\n{table}"


# ---- models and checkpoints ----


def make_models() -> str:
    """Return the named networks and the published checkpoints."""
    networks = [row for row in (model_row(name, None) for name in NAMES) if row is not None]
    rows = [
        (
            f"`{row['name']}`",
            " x ".join(map(str, row["image_size"])),
            str(row["tokens"]),
            f"{row['parameters']:,}",
            f"{row['forward_flops'] / 1e9:.3g}",
            format_bytes(row["inference_bytes"]),
            format_bytes(row["training_bytes"]),
        )
        for row in networks
    ]
    published = [row.as_dict() for row in PRETRAINED.values()]
    return join(
        [
            "# Models and checkpoints",
            NOTE,
            "## Networks",
            "`vitral.create` and `vitral train --model` take these names in any spelling of the paper: `vit-b16`, "
            "`ViT-B/16` and `ViT-B_16` are the same. GFLOPs are those of one forward pass of one image, with 2 "
            "operations per multiply-add. The last two columns are the memory for predicting one image and for "
            "training on a batch of 32 with Adam, both in float32. `vitral models` prints this table, also at "
            "another `--image-size`.",
            make_table(("name", "image", "tokens", "parameters", "GFLOPs", "memory, predict", "memory, train"), rows),
            "## Pretrained checkpoints",
            "These names work wherever a command or function takes a MODEL. The accuracies on ImageNet-1k are "
            "copied from the source of each row; vitral did not measure them. [Choose a "
            "checkpoint](../how-to/checkpoint.md) explains which one to take. **No row was tried over the "
            "network.** The tests build each network with the library that published it, at its full size. They "
            "compare names, shapes, parameters and `config.json` with what vitral loads. One row per family, "
            "reduced to one block, is also downloaded from a hub on the same machine, and its features are "
            "compared with those of its library. MAE has the layout of DINO in timm.",
            make_table(
                ("name", "on the hub", "parameters", "image", "dialect", "license", "top-1, %", "measured by"),
                [
                    (
                        f"`{row['name']}`",
                        f"`{row['hub']}`",
                        f"{row['parameters']:,}",
                        str(row["image_size"][0]),
                        row["dialect"],
                        row["license"],
                        f"{100 * row['top1']:.1f}",
                        f"[{row['protocol']}]({row['source'].partition(',')[0]})",
                    )
                    for row in published
                    if row is not None
                ],
            ),
        ]
    )


# ---- recipes ----


def make_recipes() -> str:
    """Return the head comment of every recipe."""
    sections = [
        "# Recipes",
        NOTE,
        "A recipe is a TOML file with settings. `vitral train DATA --recipe NAME` uses one, and flags change "
        "single settings. Without `--recipe`, vitral chooses `finetune` with `--from`, `small` for images of up "
        "to 80 pixels and `photos` for larger ones, and prints the choice. `--recipe none` uses the defaults "
        "alone. [Settings](settings.md) lists everything that a recipe can set.",
    ]
    for path in sorted((ROOT / "recipes").glob("*.toml")):
        lines = path.read_text(encoding="utf-8").splitlines()
        head = [line.removeprefix("#").strip() for line in lines[: next(i for i, line in enumerate(lines) if not line)]]
        text = re.sub(r" (Cost|Expected|Result)\b", r"\n\n**\1**", " ".join(head))
        sections.append(f"## {path.stem}\n\n{text}")
    return join(sections)


# ---- events ----


def make_events() -> str:
    """Return the events of a training run with their fields."""
    sections = [
        "# Events of a run",
        NOTE,
        "`vitral.train_events` yields these dataclasses of `vitral.training.events`. The console, `metrics.csv`, "
        "TensorBoard and the report read the same events. With `--format json`, `vitral train` prints one JSON "
        "object per event on standard error. The last event is `Finished` or `Interrupted`.",
    ]
    for name, node in read_classes(events).items():
        fields = [item for item in node.body if isinstance(item, ast.AnnAssign)]
        rows = [(f"`{ast.unparse(item.target)}`", f"`{ast.unparse(item.annotation)}`") for item in fields]
        table = make_table(("field", "type"), [(field, kind.replace("|", "\\|")) for field, kind in rows])
        sections.append(f"## {name}\n\n{one_line(ast.get_docstring(node) or '')}\n\n{table}")
    return join(sections)


# ---- Markdown ----


def make_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def join(sections: Iterable[str]) -> str:
    return "\n\n".join(sections) + "\n"


PAGES: dict[str, Callable[[], str]] = {
    "commands.md": make_commands,
    "settings.md": make_settings,
    "network.md": make_network,
    "models.md": make_models,
    "recipes.md": make_recipes,
    "events.md": make_events,
}


if __name__ == "__main__":
    for name, make_page in PAGES.items():
        (REFERENCE / name).write_text(make_page(), encoding="utf-8")
