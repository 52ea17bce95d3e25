"""``vitral features``: embeddings of pictures."""

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from vitral.cli.numbers import WHOLE, parse_size
from vitral.console.output import Format, show_json, show_lines


def features(
    run: str,
    /,
    *images: str,
    out: Annotated[Path, Parameter(help="Where to: .npz or .parquet.")],
    image_size: Annotated[str | None, Parameter(help="Another size than it was trained at: 224, or HxW.")] = None,
    device: Annotated[str, Parameter(help="cpu, cuda, cuda:1, mps.")] = "auto",
    precision: Annotated[str, Parameter(help="float32, bfloat16 or float16.")] = "float32",
    batch_size: Annotated[int, WHOLE, Parameter(help="Pictures at a time.")] = 32,
    format: Annotated[Format, Parameter(help="human: a line; json: the same; quiet: nothing.")] = "human",
) -> None:
    """What the head sees of each picture, with the names of the files. Exit code 3: some could not be used.

    Parameters
    ----------
    run
        A run folder, a weights file, vit-cifar10 (it comes with vitral), or hf:owner/name.
    images
        Pictures, folders, patterns, or - for paths on standard input.
    """
    from vitral.console.progress import progress_bar
    from vitral.data.sources.image_files import find_images
    from vitral.files import as_text, printable
    from vitral.inference.feature_files import check_target, write_features
    from vitral.inference.predictor import Failure, Predictor

    check_target(out)
    files = find_images(images, sys.stdin)
    predictor = Predictor(
        run, device=device, precision=precision, batch_size=batch_size, image_size=parse_size(image_size)
    )
    names, rows, failures = [], [], []
    with progress_bar("embedding", quiet=format != "human") as move:
        move(0, len(files))
        for number, (file, told) in enumerate(predictor.features(files), 1):
            if isinstance(told, Failure):
                failures.append((file, told.reason))
            else:
                names.append(as_text(file))
                rows.append(told)
            move(number, len(files))
    write_features(out, names, rows, width=predictor.ready.feature_width)
    told = {"file": str(out), "pictures": len(rows), "width": predictor.ready.feature_width, "failed": len(failures)}
    if format == "json":
        show_json({**told, "failures": [{"file": as_text(file), "error": reason} for file, reason in failures]})
    elif format == "human":
        show_lines([f"{out}: {len(rows):,} pictures, {told['width']} numbers each"])
        show_lines(f"left out: {printable(file)} ({reason})" for file, reason in failures)
    if failures:
        sys.exit(3)
