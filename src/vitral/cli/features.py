"""`vitral features`: write embeddings of images."""

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from vitral.cli.parameters import FORMAT, BatchSize, Device, Image, ImageSize, Model, Precision
from vitral.console.output import Format, show_as, show_lines


def features(
    model: Model,
    /,
    *images: Image,
    out: Annotated[Path, Parameter(help="Write the features to FILE (.npz or .parquet).", metavar="FILE")],
    image_size: ImageSize = None,
    device: Device = "auto",
    precision: Precision = "float32",
    batch_size: BatchSize = 32,
    format: Annotated[Format, FORMAT, Parameter(help="human, json or quiet.")] = "human",
) -> None:
    """Write embeddings of images: the input of the classification head.

    Unreadable images are left out, and the command then exits with code 3.

    Examples
    --------
    vitral features vit-cifar10 photos/ --out embeddings.npz
    vitral features runs/pets-1 photos/ --out embeddings.parquet
    """
    from vitral.console.predictions import describe_feature_file
    from vitral.console.progress import with_progress
    from vitral.data.sources.image_files import find_images
    from vitral.files import as_text
    from vitral.inference.predictor import Predictor
    from vitral.inference.writers import check_feature_target, features_to_file

    check_feature_target(out)
    files = find_images(images, sys.stdin)
    predictor = Predictor(model, device=device, precision=precision, batch_size=batch_size, image_size=image_size)
    result = with_progress(features_to_file(predictor, files, out), "Embedding", quiet=format != "human")
    failures = [{"file": as_text(file), "error": reason} for file, reason in result.failures]
    facts = {"file": str(result.path), "images": result.images, "width": result.width, "failed": len(failures)}
    show_as(format, json=facts | {"failures": failures}, human=lambda: show_lines(describe_feature_file(result)))
    if result.failures:
        sys.exit(3)
