"""Record docs/pictures/terminal.svg: the terminal of a run on the built-in digits and of two predictions.

python docs/pictures/terminal.py      # trains for about a minute
"""

import contextlib
import io
import re
import runpy
import shlex
import tempfile
from pathlib import Path

from rich.console import CONSOLE_SVG_FORMAT, Console
from rich.terminal_theme import TerminalTheme

import vitral.console.output
import vitral.console.training
from vitral.cli.main import main as run_command

ROOT = Path(__file__).parents[2]
TARGET = Path(__file__).with_name("terminal.svg")
COMMANDS = (
    "vitral train builtin:digits --recipe digits --steps 300 --out runs/digits",
    "vitral predict runs/digits a-7.png a-9.png --top 3",
)
BACKGROUND, FOREGROUND, BLACK, RED = (22, 27, 34), (230, 237, 243), (72, 79, 88), (255, 123, 114)
GREEN, YELLOW, BLUE, MAGENTA, CYAN = (63, 185, 80), (210, 153, 34), (88, 166, 255), (188, 140, 255), (57, 197, 207)
THEME = TerminalTheme(BACKGROUND, FOREGROUND, [BLACK, RED, GREEN, YELLOW, BLUE, MAGENTA, CYAN, FOREGROUND])
FONTS = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', 'Liberation Mono', monospace"


def main() -> None:
    console = Console(record=True, width=90, file=io.StringIO(), force_terminal=False)  # not live: no progress bars
    vitral.console.output.human_console = lambda: console
    vitral.console.training.PersistentConsole = lambda **_: console
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        runpy.run_path(str(ROOT / "examples" / "digits.py"))["main"](Path())
        for number, command in enumerate(COMMANDS):
            console.print(f"{chr(10) if number else ''}$ {command}", style="bold green", highlight=False)
            with contextlib.redirect_stdout(io.StringIO()) as output:
                run_command(shlex.split(command)[1:])
            console.print(output.getvalue(), end="", highlight=False)
    console.print()  # room for the last line, which the frame would touch
    TARGET.write_text(export(console), encoding="utf-8")


def export(console: Console) -> str:
    """Return the recording as SVG that loads no fonts: browsers do not load them for an image."""
    template = re.sub(r"@font-face {{.*?}}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    template = template.replace("Fira Code, monospace", FONTS)
    return console.export_svg(title="", theme=THEME, code_format=template, unique_id="terminal")


if __name__ == "__main__":
    main()
