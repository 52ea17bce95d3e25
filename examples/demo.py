"""The main job on built-in data, as a person would type it: train, measure, predict, read the report.

python examples/demo.py [FOLDER] [--steps N]      # FOLDER: where the run goes, a new one below runs/ by default
"""

import shlex
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--steps", type=int, help="fewer than the recipe's, to be quick")
    options = parser.parse_args()
    run = options.folder or next_folder()
    steps = ["--steps", str(options.steps)] if options.steps else []
    pictures = run.with_name(f"{run.name}-pictures")
    say("Train a small Vision Transformer on 4,000 handwritten digits.")
    vitral("train", "builtin:digits", "--recipe", "digits", "--out", str(run), *steps)
    say("Measure it on 1,000 others.")
    vitral("evaluate", str(run))
    say("Ask it about some of those.")
    subprocess.run([sys.executable, str(Path(__file__).with_name("digits.py")), str(pictures)], check=True)
    vitral("predict", str(run), str(pictures), "--top", "2")
    print(
        f"""
The report, with the mistakes as pictures:   {run / "report.html"}

What to try next (after `source .venv/bin/activate`):
  vitral train photos/                       your own pictures, a folder for each class
  vitral train photos/ --minutes 10          in the time that you have
  vitral data photos/                        look at them first
  vitral models                              the networks of the paper
  docs/start.md                              the same, slowly"""
    )


def next_folder() -> Path:
    number = 1
    while (folder := Path("runs") / f"demo-{number}").exists():
        number += 1
    return folder


def say(text: str) -> None:
    print(f"\n{text}", flush=True)


def vitral(*words: str) -> None:
    print(f"$ vitral {shlex.join(words)}", flush=True)
    subprocess.run([sys.executable, "-m", "vitral", *words], check=True)


if __name__ == "__main__":
    main()
