"""Real images to calibrate and compare an exported file with: those of the user, or of the run."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from vitral.data.dataset import Item
from vitral.data.sources import open_dataset
from vitral.data.splits import choose_splits
from vitral.errors import VitralError
from vitral.evaluation.evaluation_data import choose_evaluation_data
from vitral.inference.predictor import Failure, Predictor
from vitral.runs import Run
from vitral.weights.checkpoint import Checkpoint

CALIBRATION_IMAGES = 300
COMPARED_IMAGES = 1000
"""More images take longer and narrow the interval of the measured accuracy only slowly."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RealImages:
    """Preprocessed images with their labels."""

    calibration: np.ndarray
    """uint8 (N, C, H, W), for the ranges of int8 activations."""
    compared: np.ndarray
    """uint8 (M, C, H, W), on which the file is compared with the model."""
    labels: np.ndarray | None
    """(M,) indices of logits; None if the classes are not those of the model."""
    origin: str


def find_real_images(
    checkpoint: Checkpoint, run: Run | None, images: str | Path | None, *, calibrate: bool
) -> RealImages | None:
    """Return images of a folder or dataset, or training and validation images of the run, or None without either.

    Images that keep their own size are squashed to one, so that they are compared in batches.
    """
    if checkpoint.preprocess.resize == "native":
        checkpoint = replace(checkpoint, preprocess=replace(checkpoint.preprocess, resize="squash"))
    if images is not None and not _has_classes(images):
        arrays = _load(checkpoint, list(_paths(images))[: COMPARED_IMAGES + CALIBRATION_IMAGES])
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


def _has_classes(images: str | Path) -> bool:
    """Return whether this is a dataset with labels, not a folder of images."""
    try:
        return len(open_dataset(images).classes) > 1
    except VitralError:
        return False


def _paths(images: str | Path) -> Sequence[str]:
    from vitral.data.sources.image_files import find_images

    return find_images([str(images)], ())


def _spread(items: Sequence[Item], count: int) -> list[Item]:
    """Return evenly spaced items, so that all classes of a sorted dataset are among them."""
    indices = np.linspace(0, len(items) - 1, min(count, len(items))).astype(int)
    return [items[index] for index in indices]


def _load_items(checkpoint: Checkpoint, items: Sequence[Item]) -> tuple[np.ndarray, list[int]]:
    """Return the readable images, and which of the items they are."""
    from vitral.data.batches import ImageDataset

    dataset = ImageDataset(items, checkpoint.preprocess, patch=checkpoint.model.config.step_hw)
    loaded = [(index, image) for index in range(len(items)) if not isinstance(image := dataset[0, index][1], str)]
    arrays = [image.numpy() for _, image in loaded]
    return _stack(checkpoint, arrays), [index for index, _ in loaded]


def _load(checkpoint: Checkpoint, files: Sequence[str]) -> np.ndarray:
    predictor = Predictor(checkpoint, engine="torch")
    arrays = [image for image in map(predictor.preprocess, files) if not isinstance(image, Failure)]
    return _stack(checkpoint, arrays)


def _stack(checkpoint: Checkpoint, arrays: Sequence[np.ndarray]) -> np.ndarray:
    shape = (checkpoint.preprocess.channels, *checkpoint.preprocess.size)
    return np.stack(arrays) if arrays else np.empty((0, *shape), np.uint8)
