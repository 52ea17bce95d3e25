"""`vitral evaluate`: evaluate a model on a dataset or a suite."""

import re
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

import vitral
from vitral.cli.launch import check_single_process, end_together, launch_if_asked
from vitral.cli.parameters import (
    MERGE_HELP,
    Device,
    File,
    Format,
    ImageSize,
    OptionalInt,
    Processes,
    RunnableModel,
    Switch,
    Text,
    option,
)
from vitral.console.output import show_as
from vitral.console.progress import with_progress
from vitral.console.results import show_evaluation
from vitral.console.tables import show_suite
from vitral.devices import keep_freed_memory
from vitral.errors import ConfigError


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class Measures:
    """Measurements to take, and the labels to use. None applies to a suite."""

    few_shot: Annotated[
        Text, option("Evaluate the features by ridge regression on K images per class, such as 10 or 1,5,10.", "K")
    ] = None
    knn: Annotated[OptionalInt, option("Evaluate the features by the K nearest neighbors.", "K")] = None
    against: Annotated[Text, option("Compare with a second model on the same images.", "MODEL")] = None
    against_label_map: Annotated[File, option("The label map of the second model.")] = None
    temperature: Annotated[Switch, option("Report the calibration after temperature scaling.")] = False
    label_map: Annotated[File, option("Map classes to labels: lines of a dataset class and a model label.")] = None
    real: Annotated[File, option("Score with all true labels of each image (ReaL, JSON).")] = None
    merge: Annotated[OptionalInt, option(f"{MERGE_HELP} The model of --against merges none.", "R")] = None
    cache: Annotated[bool, option("Do not keep features on disk for the next evaluation.")] = True


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class Suite:
    """A suite of tasks, and how to train on each of them."""

    name: Annotated[
        Literal["vtab-1k"] | None,
        option("Fine-tune on each of the 19 tasks in the folder DATA.", "NAME", name="--suite"),
    ] = None
    steps: Annotated[
        OptionalInt, option("Training steps per task (with --suite).", show_default="2,500, as in the paper")
    ] = None
    accumulate: Annotated[OptionalInt, option("Micro-batches per step (with --suite), to save memory.")] = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class Inference:
    """How to run the model. The defaults of a suite are those of its protocol."""

    image_size: ImageSize = None
    device: Device = "auto"
    engine: Annotated[
        Text,
        option("torch, compiled, onnxruntime, openvino or auto.", "ENGINE", show_default="torch; openvino for int8"),
    ] = None
    precision: Annotated[
        Text, option("float32, bfloat16, float16 or int8.", "PRECISION", show_default="float32; auto with --suite")
    ] = None
    batch_size: Annotated[OptionalInt, option("Images per batch.", show_default="64; 512 with --suite")] = None
    workers: Annotated[OptionalInt, option("Processes that load images.", show_default="0; auto with --suite")] = None


def evaluate(
    model: RunnableModel,
    data: str | None = None,
    /,
    *,
    measures: Measures = Measures(),  # noqa: B008 (frozen, as the next two)
    suite: Suite = Suite(),  # noqa: B008
    inference: Inference = Inference(),  # noqa: B008
    processes: Processes = None,
    format: Annotated[Format, option("human, json or quiet (top-1 only).")] = "human",
) -> None:
    """Evaluate a model: accuracy with confidence intervals, calibration, mistakes.

    Exits with code 3 if some images are unreadable.

    Parameters
    ----------
    data
        A dataset. Default: the test split of the run.

    Examples
    --------
    vitral evaluate runs/photos-1
    vitral evaluate vit-cifar10 photos/test --against runs/photos-1
    vitral evaluate hf:facebook/dinov2-small photos/ --knn 10 --few-shot 1,5,10
    """
    launch_if_asked(processes)
    if suite.name is None:
        check_unset(suite, hint="Pass --suite vtab-1k.", problem="applies to a suite only")
        evaluate_model(model, data, measures, inference, format)
        return
    check_single_process("evaluate --suite")
    check_unset(measures, hint="Drop it.", problem="cannot be combined with --suite")
    if inference.engine is not None:
        raise ConfigError("--engine cannot be combined with --suite.", hint="Drop it.")
    settings = {**asdict(inference), "steps": suite.steps, "accumulate": suite.accumulate}
    evaluate_suite(model, data, {name: value for name, value in settings.items() if value is not None}, format)


def check_unset(options: Measures | Suite, *, problem: str, hint: str) -> None:
    """Raise ConfigError if one of the options was passed."""
    for field in fields(options):
        if getattr(options, field.name) != field.default:
            flag = f"--{'no-' if field.default is True else ''}{field.name.replace('_', '-')}"
            raise ConfigError(f"{flag} {problem}.", hint=hint)


def evaluate_model(model: str, data: str | None, measures: Measures, inference: Inference, format: Format) -> None:
    """Evaluate a model on one dataset and show the result. Exit with code 3 if some images are unreadable."""
    from vitral.evaluation.evaluator import EvaluateOptions, evaluate_events

    keep_freed_memory()
    options: dict[str, Any] = asdict(measures) | asdict(inference) | {"few_shot": parse_shots(measures.few_shot)}
    options["on_stage"] = lambda stage: print(f"vitral: {stage}", file=sys.stderr)
    passed = EvaluateOptions(**{name: value for name, value in options.items() if value is not None})
    evaluation = with_progress(evaluate_events(model, data, passed), "Evaluating", quiet=format != "human")
    scores = evaluation.as_dict()
    top1 = (evaluation.knn or evaluation.few_shot or {"top1": evaluation.scores.top1})["top1"]
    content = scores | {"test": evaluation.scores.as_dict()}
    show_as(format, json=content, quiet=[f"{top1:.4f}"], human=lambda: show_evaluation(scores))
    end_together(3 if evaluation.unreadable else 0)


def parse_shots(text: str | None) -> tuple[int, ...] | None:
    """Return the numbers of a list such as 1,5,10."""
    if text is None:
        return None
    numbers = text.split(",")
    if not all(re.fullmatch("[0-9]{1,9}", number.strip()) for number in numbers):
        raise ConfigError(f"--few-shot must be an integer or a list of integers such as 1,5,10 (got {text}).")
    return tuple(int(number) for number in numbers)


def evaluate_suite(model: str, data: str | None, settings: dict[str, Any], format: Format) -> None:
    """Run a suite and show its results. Exit with a code if it was interrupted or tasks failed."""
    from vitral.suites.runner import SuiteResult, suite_events

    if data is None:
        raise ConfigError("--suite needs the folder of its tasks.", hint="vitral evaluate MODEL DIR --suite vtab-1k")
    source = str(vitral.Run(model).trained_model()) if vitral.Run.is_run(Path(model)) else model
    ending = with_progress(suite_events(source, data, **settings), "vtab-1k", quiet=format != "human")
    assert isinstance(ending, SuiteResult)
    result = ending.as_dict()
    mean = f"{result['mean']:.4f}" if result["tasks"] else "nan"
    show_as(format, json=result, quiet=[mean], human=lambda: show_suite(result))
    if result["interrupted"]:
        sys.exit(128 + result["signal"])
    if result["failed"] or any(task["unreadable"] for task in result["tasks"]):
        sys.exit(3)
