"""`vitral predict` and `vitral features`: labels and embeddings of images."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from vitral.cli.launch import end_together, launch_if_asked
from vitral.cli.parameters import (
    BatchSize,
    Device,
    Engine,
    Format,
    Image,
    ImageSize,
    Integer,
    Merge,
    Model,
    OptionalNumber,
    Precision,
    Processes,
    RunnableModel,
    Switch,
    option,
)
from vitral.console.output import show_as, show_lines
from vitral.console.progress import progress_bar, with_progress
from vitral.console.results import describe_feature_file, describe_prediction_file, write_human, write_quiet
from vitral.devices import keep_freed_memory
from vitral.errors import ConfigError, check_int, check_number
from vitral.files import as_text, printable

if TYPE_CHECKING:
    from vitral.data.scan import Progress
    from vitral.inference.predictor import Predictor
    from vitral.inference.writers import PredictionFile


def predict(
    model: RunnableModel,
    /,
    *images: Image,
    top: Annotated[Integer, option("Number of labels per image.")] = 5,
    out: Annotated[Path | None, option("Write the rows to FILE (.csv or .jsonl).", "FILE")] = None,
    reject: Annotated[
        OptionalNumber, option("Leave out the label of images that are at least this unusual, such as 0.95.")
    ] = None,
    resume: Annotated[Switch, option("Continue an interrupted --out file.")] = False,
    image_size: ImageSize = None,
    merge: Merge = None,
    device: Device = "auto",
    engine: Engine = "auto",
    precision: Precision = "auto",
    batch_size: BatchSize = 32,
    processes: Processes = None,
    format: Annotated[
        Literal["human", "json", "csv", "quiet"], option("human, json, csv or quiet.", "FORMAT", show_choices=False)
    ] = "human",
) -> None:
    """Predict labels for images.

    Prints one row per image, in order. Unreadable images get an error row, and the command then exits with code 3.
    A run folder also reports how unusual each image is: 0.95 means that 5% of ordinary images look as unusual.

    Examples
    --------
    vitral predict vit-cifar10 photo.jpg
    vitral predict runs/pets-1 photos/ --out labels.csv
    vitral predict runs/pets-1 photos/ --reject 0.95
    find photos -name '*.jpg' | vitral predict runs/pets-1 - --format json
    """
    launch_if_asked(processes)
    from vitral.collectives import join_world
    from vitral.inference.writers import predict_to_file

    join_world()
    check_int("--top", top, minimum=1)
    if reject is not None:
        check_number("--reject", reject, above=0, maximum=1)
    check_output(out, format, resume=resume)
    files = list_images(images)
    predictor = open_predictor(
        model,
        images,
        device=device,
        engine=engine,
        precision=precision,
        batch_size=batch_size,
        image_size=image_size,
        merge=merge,
    )
    if reject is not None:
        predictor.check_can_reject()
    if out is None:
        failed = print_rows(predictor, files, top, format, reject)
    else:
        events = predict_to_file(predictor, files, out, top=top, reject=reject, resume=resume)
        failed = write_rows(events, out, quiet=format != "human")
    end_together(3 if failed else 0)


def check_output(out: Path | None, format: str, *, resume: bool) -> None:
    """Raise ConfigError for options that contradict each other and for a file that cannot be written or continued."""
    from vitral.collectives import current_world
    from vitral.inference.writers import check_prediction_target

    if out is None and resume:
        raise ConfigError("--resume needs a file to continue.", hint="Pass --out FILE.")
    if out is not None and current_world().is_first:  # the file exists once the first process has created it
        check_prediction_target(out, resume=resume)
    if out is not None and format in ("json", "csv"):
        raise ConfigError(f"--format {format} does not apply to --out.", hint="Its suffix chooses the format.")


def list_images(images: tuple[str, ...]) -> list[str]:
    """Return the images that the arguments name. Only the first process reads standard input and lists folders."""
    from vitral.collectives import current_world, from_first
    from vitral.data.sources.image_files import find_images

    return from_first(find_images(images, sys.stdin) if current_world().is_first else [])


def open_predictor(model: str, images: tuple[str, ...], **options: Any) -> "Predictor":
    """Return the predictor. Its warnings, and later the engine that it chooses, appear on standard error.

    Without a run, int8 is calibrated on the first folder of the images.
    """
    from vitral.inference.predictor import Predictor
    from vitral.runs import Run

    keep_freed_memory()  # makes batches of 32 up to 1.14 times as fast (docs/decisions/speed.md)
    folder = next((path for path in images if Path(path).is_dir()), None)
    options["calibration"] = None if Run.is_run(Path(model)) else folder
    predictor = Predictor(model, on_choice=lambda reason: print(f"vitral: {reason}", file=sys.stderr), **options)
    for warning in predictor.loaded.warnings:
        print(f"vitral: warning: {printable(warning)}", file=sys.stderr)
    return predictor


def write_rows(events: "Iterator[Progress | PredictionFile]", out: Path, *, quiet: bool) -> int:
    """Write a file of predictions and return the number of unusable images."""
    try:
        result = with_progress(events, "Predicting", quiet=quiet)
    except KeyboardInterrupt:
        print(f"vitral: {out} is incomplete. Run the same command with --resume to continue.", file=sys.stderr)
        raise
    if not quiet:
        print(describe_prediction_file(result), file=sys.stderr)
    return result.failed


def print_rows(predictor: "Predictor", files: list[str], top: int, format: str, reject: float | None) -> int:
    """Print a row per image and return the number of unusable images."""
    from vitral.inference.writers import CSV, JSON_LINES, share_rows

    write = {"human": write_human, "json": JSON_LINES.write, "csv": CSV.write, "quiet": write_quiet}[format]
    top = min(top, len(predictor.labels))
    failed = 0
    with progress_bar("Predicting", quiet=format != "human") as move:
        for number, row in enumerate(share_rows(predictor, files, top=top, reject=reject), 1):
            if number == 1 and format == "csv":
                CSV.write_header(sys.stdout, top)
            write(sys.stdout, row, top)
            failed += row.error is not None
            if number % predictor.batch_size == 0 or number == len(files):
                sys.stdout.flush()
                move(number, len(files))
    return failed


def features(
    model: Model,
    /,
    *images: Image,
    out: Annotated[Path, option("Write the features to FILE (.npz or .parquet).", "FILE")],
    image_size: ImageSize = None,
    merge: Merge = None,
    device: Device = "auto",
    engine: Engine = "auto",
    precision: Precision = "auto",
    batch_size: BatchSize = 32,
    processes: Processes = None,
    format: Format = "human",
) -> None:
    """Write embeddings of images: the input of the classification head.

    Unreadable images are left out, and the command then exits with code 3.

    Examples
    --------
    vitral features vit-cifar10 photos/ --out embeddings.npz
    vitral features runs/pets-1 photos/ --out embeddings.parquet
    """
    launch_if_asked(processes)
    from vitral.collectives import join_world
    from vitral.inference.feature_files import check_feature_target, features_to_file

    if join_world().is_first:
        check_feature_target(out)
    files = list_images(images)
    predictor = open_predictor(
        model,
        images,
        device=device,
        engine=engine,
        precision=precision,
        batch_size=batch_size,
        image_size=image_size,
        merge=merge,
    )
    result = with_progress(features_to_file(predictor, files, out), "Embedding", quiet=format != "human")
    failures = [{"file": as_text(file), "error": reason} for file, reason in result.failures]
    facts = {"file": str(result.path), "images": result.images, "width": result.width, "failed": len(failures)}
    facts |= {"engine": result.engine}
    show_as(format, json=facts | {"failures": failures}, human=lambda: show_lines(describe_feature_file(result)))
    end_together(3 if result.failures else 0)
