"""`vitral predict`: predict labels for images."""

import sys
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from vitral.cli.parameters import FORMAT, BatchSize, Device, File, Image, ImageSize, Integer, Model, Precision, Switch
from vitral.errors import ConfigError, check_int
from vitral.files import printable

if TYPE_CHECKING:
    from vitral.inference.predictor import Predictor


def predict(
    model: Model,
    /,
    *images: Image,
    top: Annotated[Integer, Parameter(help="Number of labels per image.")] = 5,
    out: Annotated[File, Parameter(help="Write the rows to FILE (.csv or .jsonl).")] = None,
    resume: Annotated[Switch, Parameter(help="Continue an interrupted --out file.")] = False,
    image_size: ImageSize = None,
    device: Device = "auto",
    precision: Precision = "float32",
    batch_size: BatchSize = 32,
    format: Annotated[
        Literal["human", "json", "csv", "quiet"], FORMAT, Parameter(help="human, json, csv or quiet.")
    ] = "human",
) -> None:
    """Predict labels for images.

    Prints one row per image, in order. Unreadable images get an error row, and the command then exits with code 3.

    Examples
    --------
    vitral predict vit-cifar10 photo.jpg
    vitral predict runs/pets-1 photos/ --out labels.csv
    find photos -name '*.jpg' | vitral predict runs/pets-1 - --format json
    """
    from vitral.console.predictions import describe_prediction_file
    from vitral.console.progress import with_progress
    from vitral.data.sources.image_files import find_images
    from vitral.inference.predictor import Predictor
    from vitral.inference.writers import check_prediction_target, predict_to_file

    check_int("--top", top, minimum=1)
    if out is not None:
        check_prediction_target(out, resume=resume)
        if format in ("json", "csv"):
            raise ConfigError(f"--format {format} does not apply to --out.", hint="Its suffix chooses the format.")
    elif resume:
        raise ConfigError("--resume needs a file to continue.", hint="Pass --out FILE.")
    files = find_images(images, sys.stdin)
    predictor = Predictor(model, device=device, precision=precision, batch_size=batch_size, image_size=image_size)
    for warning in predictor.loaded.warnings:
        print(f"vitral: warning: {printable(warning)}", file=sys.stderr)
    if out is None:
        failed = print_rows(predictor, files, top, format)
    else:
        events = predict_to_file(predictor, files, out, top=top, resume=resume)
        try:
            result = with_progress(events, "Predicting", quiet=format != "human")
        except KeyboardInterrupt:
            print(f"vitral: {out} is incomplete. Run the same command with --resume to continue.", file=sys.stderr)
            raise
        failed = result.failed
        if format == "human":
            print(describe_prediction_file(result), file=sys.stderr)
    if failed:
        sys.exit(3)


def print_rows(predictor: "Predictor", files: list[str], top: int, format: str) -> int:
    """Print a row per image and return the number of unusable images."""
    from vitral.console.predictions import write_human, write_quiet
    from vitral.console.progress import progress_bar
    from vitral.inference.writers import CSV, JSON_LINES, predict_rows

    write = {"human": write_human, "json": JSON_LINES.write, "csv": CSV.write, "quiet": write_quiet}[format]
    top = min(top, len(predictor.labels))
    failed = 0
    with progress_bar("Predicting", quiet=format != "human") as move:
        for number, row in enumerate(predict_rows(predictor, files, top=top), 1):
            if number == 1 and format == "csv":
                CSV.write_header(sys.stdout, top)
            write(sys.stdout, row, top)
            failed += row.error is not None
            if number % predictor.batch_size == 0 or number == len(files):
                sys.stdout.flush()
                move(number, len(files))
    return failed
