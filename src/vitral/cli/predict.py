"""``vitral predict``: labels for pictures."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from vitral.cli.numbers import WHOLE, parse_size
from vitral.errors import ConfigError


def predict(
    run: str,
    /,
    *images: str,
    top: Annotated[int, WHOLE, Parameter(help="How many labels a picture.")] = 5,
    out: Annotated[Path | None, Parameter(help="Write rows there: .csv or .jsonl.")] = None,
    resume: Annotated[bool, Parameter(help="Go on with --out after an interruption.", negative="")] = False,
    image_size: Annotated[str | None, Parameter(help="Another size than it was trained at: 224, or HxW.")] = None,
    device: Annotated[str, Parameter(help="cpu, cuda, cuda:1, mps.")] = "auto",
    precision: Annotated[str, Parameter(help="float32, bfloat16 or float16.")] = "float32",
    batch_size: Annotated[int, WHOLE, Parameter(help="Pictures at a time.")] = 32,
    format: Annotated[
        Literal["human", "json", "csv", "quiet"], Parameter(help="human: a table; json: a line a picture.")
    ] = "human",
) -> None:
    """Labels for pictures, a row for each in the order given. Exit code 3: some could not be used, and say why.

    Parameters
    ----------
    run
        A run folder, a weights file, vit-cifar10 (it comes with vitral), or hf:owner/name.
    images
        Pictures, folders, patterns, or - for paths on standard input.
    """
    from vitral.console.progress import progress_bar
    from vitral.data.sources.image_files import find_images
    from vitral.inference.predictor import Failure, Predictor
    from vitral.inference.writers import check_same_model, check_target, open_rows

    if top < 1:
        raise ConfigError(f"--top {top} must be at least 1.")
    if resume and out is None:
        raise ConfigError("--resume goes on with a file, and there is no --out.")
    if out is not None and format in ("json", "csv"):
        raise ConfigError(
            f"--out {out} takes the rows, so --format {format} has nothing to print.",
            hint="The ending of --out says how rows are written: .csv or .jsonl.",
        )
    if out is not None:
        check_target(out, resume=resume)
    files = find_images(images, sys.stdin)
    predictor = Predictor(
        run, device=device, precision=precision, batch_size=batch_size, image_size=parse_size(image_size)
    )
    predictor.ready.check_answers()
    top = min(top, len(predictor.labels))
    with told_how_to_go_on(out), open_rows(out, format, top, files, resume=resume) as rows:

        def ask(place: int) -> list[tuple[str, float]] | None:
            _, told = next(predictor.stream([files[place]]))
            return None if isinstance(told, Failure) else told.top(top)

        check_same_model(rows.already, ask)
        rest, failed = files[rows.done :], rows.failed
        with progress_bar("predicting", quiet=format != "human") as move:
            move(rows.done, len(files))
            for number, (file, told) in enumerate(predictor.stream(rest), rows.done + 1):
                if isinstance(told, Failure):
                    failed += 1
                    rows.add_error(file, told.reason)
                else:
                    rows.add(file, told.top(top))
                if number % batch_size == 0 or number == len(files):
                    rows.keep()
                    move(number, len(files))
    if out is not None and format == "human":
        unusable = f", of which {failed:,} could not be used and say why" if failed else ""
        sys.stderr.write(f"{out}: {len(files):,} row{'' if len(files) == 1 else 's'}{unusable}\n")
    if failed:
        sys.exit(3)


@contextmanager
def told_how_to_go_on(out: Path | None) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        if out is not None:
            sys.stderr.write(f"{out} is kept; go on with the same command and --resume.\n")
        raise
