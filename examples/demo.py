"""Train, evaluate and predict on built-in data with the commands that a person would run.

python examples/demo.py [FOLDER] [--steps N]      # FOLDER: the run folder, by default runs/demo-<n>
"""

import shlex
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--steps", type=int, help="train for fewer steps than the recipe")
    options = parser.parse_args()
    run = options.folder or next_folder()
    steps = ["--steps", str(options.steps)] if options.steps else []
    images = run.with_name(f"{run.name}-images")
    announce("Train a small Vision Transformer on 4,000 handwritten digits.")
    vitral("train", "builtin:digits", "--recipe", "digits", "--out", str(run), *steps)
    announce("Evaluate it on 1,000 others.")
    vitral("evaluate", str(run))
    announce("Predict some of those.")
    subprocess.run([sys.executable, str(Path(__file__).with_name("digits.py")), str(images)], check=True)
    vitral("predict", str(run), str(images), "--top", "2")
    print(
        f"""
The report, with the mistakes:   {run / "report.html"}

What to try next (after `source .venv/bin/activate`):
  vitral inspect {run} {images} --out {run.with_name(f"{run.name}-inside")}
                                        see where the model looks
  vitral data photos/                   check your own images, in one folder per class
  vitral train photos/ --from auto --minutes 10
                                        fine-tune a pretrained checkpoint on them, in the time that you have
  docs/tutorials/first-model.md         read a slower introduction"""
    )


def next_folder() -> Path:
    """Return the first of runs/demo-1, runs/demo-2, ... that does not exist."""
    number = 1
    while (folder := Path("runs") / f"demo-{number}").exists():
        number += 1
    return folder


def announce(text: str) -> None:
    print(f"\n{text}", flush=True)


def vitral(*arguments: str) -> None:
    print(f"$ vitral {shlex.join(arguments)}", flush=True)
    subprocess.run([sys.executable, "-m", "vitral", *arguments], check=True)


if __name__ == "__main__":
    main()
