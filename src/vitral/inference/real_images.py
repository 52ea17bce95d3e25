"""Real images to calibrate int8 with and to compare an exported file on: those of the user, or of the run."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from vitral.data.batches import ImageDataset
from vitral.data.dataset import NO_LABEL, FileSource, Item
from vitral.data.sources import open_dataset
from vitral.data.sources.image_files import find_images
from vitral.data.splits import choose_splits
from vitral.errors import ConfigError, DataError, VitralError
from vitral.inference.engines.quantization import RealImages
from vitral.inference.evaluation_data import choose_evaluation_data
from vitral.runs import Run
from vitral.weights.checkpoint import Checkpoint

CALIBRATION_IMAGES = 300
MIN_CALIBRATION_IMAGES = 8
COMPARED_IMAGES = 1000
"""More images take longer and narrow the interval of the measured accuracy only slowly."""


def find_real_images(
    checkpoint: Checkpoint, run: Run | None, images: str | Path | None, *, calibrate: bool
) -> RealImages | None:
    """Return images of a folder or dataset, or training and validation images of the run, or None without either.

    Images that keep their own size are squashed to one, so that they are compared in batches.
    """
    if checkpoint.preprocess.resize == "native":
        checkpoint = replace(checkpoint, preprocess=replace(checkpoint.preprocess, resize="squash"))
    if images is not None and not _has_classes(images):
        files = _paths(images)[: COMPARED_IMAGES + CALIBRATION_IMAGES]
        arrays = _load_items(checkpoint, [Item(key=file, label=NO_LABEL, source=FileSource(file)) for file in files])[0]
        if not len(arrays):
            raise DataError(f"{images} was not found, or has no readable image.")
        half = min(len(arrays) // 2, CALIBRATION_IMAGES) if calibrate else 0
        return RealImages(calibration=arrays[:half], compared=arrays[half:], labels=None, origin=str(images))
    if images is None:
        try:
            data = choose_evaluation_data(run, None, needs_train=True) if run else None
        except VitralError:  # the dataset is gone or has changed
            data = None
        if data is None or run is None:
            return None
        train, compared, classes = data.train, data.validation or data.train, data.dataset.classes
        origin = "validation images of the run"
    else:
        dataset = open_dataset(images)
        splits = choose_splits(dataset)
        train, compared, classes = splits.train, splits.validation, dataset.classes
        origin = f"validation images of {images}"
    chosen = _spread(compared, COMPARED_IMAGES)
    arrays, kept = _load_items(checkpoint, chosen)
    calibration = _load_items(checkpoint, _spread(train, CALIBRATION_IMAGES))[0] if calibrate else arrays[:0]
    labels = checkpoint.labels
    is_matched = labels is not None and set(classes) <= set(labels) and not checkpoint.multi_label
    positions = {name: index for index, name in enumerate(labels or ())}
    targets = np.array([positions[classes[chosen[index].labels[0]]] for index in kept]) if is_matched else None
    return RealImages(calibration=calibration, compared=arrays, labels=targets, origin=origin)


def check_calibration(images: RealImages | None, *, hint: str) -> RealImages:
    """Return the images, or raise ConfigError unless they suffice to calibrate int8 and to measure its accuracy."""
    if images is None:
        problem = "int8 needs images to calibrate with: the model has no run, or its dataset changed."
        raise ConfigError(problem, hint=hint)
    count = min(len(images.calibration), len(images.compared))
    if count < MIN_CALIBRATION_IMAGES:
        problem = f"int8 needs at least {MIN_CALIBRATION_IMAGES} images each to calibrate and to compare (got {count})."
        raise ConfigError(problem, hint=hint)
    return images


def calibration_images(checkpoint: Checkpoint, run: Run | None, images: str | Path | None) -> RealImages:
    """Return what `find_real_images` finds to calibrate int8 with, or raise ConfigError if that does not suffice."""
    once = "xport it once: vitral export MODEL --to openvino --precision int8 --images FOLDER."
    start = "Pass a folder to `predict` or `features`, or e" if run is None else "E"
    hint = f"{start}{once} In Python, pass calibration=FOLDER."
    return check_calibration(find_real_images(checkpoint, run, images, calibrate=True), hint=hint)


def fingerprint_images(run: Run | None, images: str | Path | None) -> str:
    """Return a text that changes with the images of `find_real_images`, which are not read for it."""
    if images is None:
        manifest = run.read_manifest() if run else {}
        return " ".join(str(manifest.get(name)) for name in ("data_fingerprint", "val_fingerprint"))
    if _has_classes(images):
        dataset = open_dataset(images)
        return dataset.fingerprint() + dataset.content_fingerprint()
    digest = hashlib.sha256()
    for path in _paths(images):
        status = os.stat(path) if os.path.exists(path) else None
        digest.update(f"{path}\t{status and (status.st_size, status.st_mtime_ns)}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _has_classes(images: str | Path) -> bool:
    """Return whether this is a dataset with labels, not a folder of images."""
    try:
        return len(open_dataset(images).classes) > 1
    except VitralError:
        return False


def _paths(images: str | Path) -> Sequence[str]:
    return find_images([str(images)], ())


def _spread(items: Sequence[Item], count: int) -> list[Item]:
    """Return evenly spaced items, so that all classes of a sorted dataset are among them."""
    indices = np.linspace(0, len(items) - 1, min(count, len(items))).astype(int)
    return [items[index] for index in indices]


def _load_items(checkpoint: Checkpoint, items: Sequence[Item]) -> tuple[np.ndarray, list[int]]:
    """Return the readable images, and which of the items they are."""
    dataset = ImageDataset(items, checkpoint.preprocess, patch=checkpoint.model.config.step_hw)
    loaded = [(index, image) for index in range(len(items)) if not isinstance(image := dataset[0, index][1], str)]
    arrays = [image.numpy() for _, image in loaded]
    return _stack(checkpoint, arrays), [index for index, _ in loaded]


def _stack(checkpoint: Checkpoint, arrays: Sequence[np.ndarray]) -> np.ndarray:
    shape = (checkpoint.preprocess.channels, *checkpoint.preprocess.size)
    return np.stack(arrays) if arrays else np.empty((0, *shape), np.uint8)
