"""``vitral evaluate``: how good a model is."""

import re
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from vitral.cli.numbers import WHOLE, parse_size
from vitral.console.output import Format, show_json, show_lines
from vitral.errors import ConfigError


def evaluate(
    run: str,
    data: str | None = None,
    /,
    *,
    few_shot: Annotated[
        str | None, Parameter(help="Measure the features: ridge regression on K a class, such as 10, or 1,5,10,25.")
    ] = None,
    knn: Annotated[int | None, WHOLE, Parameter(help="Measure the features: a vote of the K nearest.")] = None,
    suite: Annotated[Literal["vtab-1k"] | None, Parameter(help="Fine-tune on each of 19 tasks in DATA.")] = None,
    steps: Annotated[
        int | None, WHOLE, Parameter(help="Of each task of a suite; by default the paper's 2,500.")
    ] = None,
    accumulate: Annotated[
        int | None, WHOLE, Parameter(help="Of a suite: parts that a batch is computed in, which saves memory.")
    ] = None,
    against: Annotated[str | None, Parameter(help="Another model, on the same pictures.")] = None,
    temperature: Annotated[bool, Parameter(help="Also calibrate by temperature scaling.", negative="")] = False,
    label_map: Annotated[Path | None, Parameter(help="A file: the data's class, the model's label.")] = None,
    real: Annotated[Path | None, Parameter(help="A JSON file of all true labels (ReaL).")] = None,
    image_size: Annotated[str | None, Parameter(help="Another size than it was trained at: 224, or HxW.")] = None,
    device: Annotated[str, Parameter(help="cpu, cuda, cuda:1, mps.")] = "auto",
    precision: Annotated[
        str | None, Parameter(help="float32, bfloat16 or float16; by default float32, in a suite the device's.")
    ] = None,
    batch_size: Annotated[
        int | None, WHOLE, Parameter(help="Pictures at a time; by default 64, in a suite 512.")
    ] = None,
    workers: Annotated[
        int | None, WHOLE, Parameter(help="Processes that load pictures; by default none, in a suite the device's.")
    ] = None,
    cache: Annotated[bool, Parameter(help="Keep features on the disk for the next time.")] = True,
    format: Annotated[Format, Parameter(help="human: a page; json: everything; quiet: the top-1.")] = "human",
) -> None:
    """How good a model is: top-1 with its interval, each class, calibration, mistakes. Exit code 3: some pictures could
    not be read.

    Parameters
    ----------
    run
        A run folder, a weights file, vit-cifar10 (it comes with vitral), or hf:owner/name.
    data
        What to measure on; by default what the run held out.
    """
    if suite is not None:
        others = {"few-shot": few_shot, "knn": knn, "against": against, "label-map": label_map, "real": real}
        refuse_beside_suite({**others, "temperature": temperature, "no-cache": not cache})
        asked = {"steps": steps, "batch_size": batch_size, "image_size": parse_size(image_size)}
        asked |= {"device": device, "precision": precision, "workers": workers, "accumulate": accumulate}
        evaluate_suite(run, data, {name: value for name, value in asked.items() if value is not None}, format)
        return
    for name, value in (("steps", steps), ("accumulate", accumulate)):
        if value is not None:
            raise ConfigError(f"--{name} is for a suite, and there is no --suite.")
    from vitral.console.evaluation import show_evaluation
    from vitral.console.progress import with_progress
    from vitral.evaluation.evaluator import evaluating

    events = evaluating(
        run,
        data,
        few_shot=parse_shots(few_shot),
        cache=cache,
        knn=knn,
        against=against,
        temperature=temperature,
        label_map=label_map,
        real=real,
        device=device,
        precision=precision or "float32",
        batch_size=64 if batch_size is None else batch_size,
        workers=workers or 0,
        image_size=parse_size(image_size),
    )
    found = with_progress(events, "asking the model", quiet=format != "human")
    told = found.as_dict()
    if format == "json":
        show_json({**told, "test": {name: told[name] for name in _CONTRACT if name in told}})
    elif format == "quiet":
        show_lines([f"{told['top1']:.4f}"])
    else:
        show_evaluation(told)
    if found.unreadable:
        sys.exit(3)


def parse_shots(words: str | None) -> tuple[int, ...] | None:
    if words is None:
        return None
    parts = words.split(",")
    if not all(re.fullmatch("[0-9]{1,9}", part.strip()) for part in parts):
        raise ConfigError(f"--few-shot {words!r} must be a whole number or several, such as 10 or 1,5,10,25.")
    return tuple(int(part) for part in parts)


def refuse_beside_suite(others: dict[str, object]) -> None:
    if said := [name for name, value in others.items() if value is not None and value is not False]:
        raise ConfigError(f"--{said[0]} does not go with --suite.")


def evaluate_suite(run: str, data: str | None, asked: dict[str, Any], format: Format) -> None:
    from vitral.console.progress import progress_bar
    from vitral.console.suite import show_suite
    from vitral.runs import Run
    from vitral.suites.runner import SuiteResult, TaskProgress, run_suite

    if data is None:
        raise ConfigError("--suite needs the place of its tasks.", hint="vitral evaluate RUN DIR --suite vtab-1k")
    model = str(Run.open(Path(run)).trained_model()) if Run.is_run(Path(run)) else run
    told: dict[str, Any] = {}
    with progress_bar("vtab-1k", quiet=format != "human") as move:
        for event in run_suite(model, data, **asked):
            if isinstance(event, TaskProgress):
                move(event.done, event.total)
            elif isinstance(event, SuiteResult):
                told = event.as_dict()
    if format == "json":
        show_json(told)
    elif format == "quiet":
        show_lines([f"{told['mean']:.4f}" if told["tasks"] else "nan"])
    else:
        show_suite(told)
    if told["interrupted"]:
        sys.exit(128 + told["signal"])
    if told["failed"] or any(task["unreadable"] for task in told["tasks"]):
        sys.exit(3)


_CONTRACT = ("top1", "top5", "images", "loss")
