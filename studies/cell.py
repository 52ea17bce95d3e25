"""One cell of a study: train, or go on with training, measure, and write study.json beside the run."""

import json
import sys
from pathlib import Path
from typing import Any

import vitral
from vitral.train.begin import train
from vitral.train.events import Finished


def main(data: str, folder: str, seed: str, told: str) -> None:
    run, cell = Path(folder), json.loads(told)
    has_begun = (run / "config.toml").is_file()
    settings: dict[str, Any] = {**cell["settings"], "seed": int(seed)}
    settings.setdefault("recipe", "none")
    events = train(resume=run) if has_begun else train(data, out=run, **nested(settings))
    finished = next(event for event in events if isinstance(event, Finished))
    report = json.loads((run / "report.json").read_text())
    found = {
        "cell": cell["cell"],
        "seed": int(seed),
        "top1": finished.held_out["top1"],
        "loss": finished.held_out["loss"],
        "seconds": report["train_seconds"],
        "steps": report["steps"],
        "parameters": report["parameters"],
        "others": {name: measure(run, data, how) for name, how in cell["evaluations"].items()},
    }
    aside = run / "study.json.part"
    aside.write_text(json.dumps(found, indent=1))
    aside.replace(run / "study.json")


def nested(settings: dict[str, Any]) -> dict[str, Any]:
    """optim.lr -> optim: lr."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        section, dot, rest = name.partition(".")
        if dot:
            found.setdefault(section, {})[rest] = value
        else:
            found[name] = value
    return found


def measure(run: Path, data: str, how: dict[str, Any]) -> float:
    how = {name: tuple(value) if isinstance(value, list) else value for name, value in how.items()}
    return vitral.evaluate(run / "model.safetensors", data, **how).scores.top1


if __name__ == "__main__":
    main(*sys.argv[1:])
