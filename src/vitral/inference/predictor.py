"""Predict labels of images with the same preprocessing and the same numbers as `vitral evaluate`."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

import numpy as np
import torch
from torch import Tensor

from vitral.data.dataset import FileSource
from vitral.data.decode import BadImageError, from_array, from_pillow
from vitral.data.sources.image_files import find_images
from vitral.data.transforms import preprocess_image
from vitral.errors import ConfigError, DataError, check_int
from vitral.inference.loaded_model import Images, LoadedModel, load_model
from vitral.inference.novelty import Novelty
from vitral.weights.checkpoint import Checkpoint

if TYPE_CHECKING:
    from PIL.Image import Image

    ImageInput = str | Path | bytes | Image | np.ndarray | Tensor

MAX_BATCH_SIZE = 2**31
AnyInput = TypeVar("AnyInput", bound="ImageInput")
Output = TypeVar("Output")


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Prediction:
    """The labels of one image with their probabilities."""

    label: str
    """The most probable label."""
    probability: float
    labels: tuple[str, ...] = field(repr=False)
    probabilities: np.ndarray = field(repr=False)
    """(K,): the probability of each label. They sum to 1 unless the model is multi-label."""
    unusual: float | None = None
    """From 0 to 1: the fraction of images like those of the training that are less unusual. None without a run that
    stored the statistics of its training features."""

    def top(self, k: int = 5) -> list[tuple[str, float]]:
        """Return the k most probable labels with their probabilities, most probable first."""
        check_int("k", k, minimum=1)
        order = np.argsort(-self.probabilities, kind="stable")[:k]
        return [(self.labels[index], float(self.probabilities[index])) for index in order]


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """The reason why an image cannot be used."""

    reason: str


class Predictor:
    """A model that predicts labels of images.

    An image is a path, the bytes of a file, a PIL image, an array (H, W, C) or (H, W), or a uint8 tensor (C, H, W).
    Several threads may share a Predictor.
    """

    def __init__(
        self,
        source: str | Path | Checkpoint,
        *,
        device: str = "auto",
        precision: str = "float32",
        batch_size: int = 32,
        image_size: int | tuple[int, int] | None = None,
        merge: int | None = None,
    ):
        """Load the model.

        Args:
            source: a run folder, a weights file, a shipped or pretrained name, ``hf:owner/name``, or a Checkpoint.
            device: cpu, cuda, cuda:1, mps or auto.
            precision: float32, bfloat16 or float16.
            batch_size: images per batch.
            image_size: another input size than the model was trained at.
            merge: pairs of similar tokens to merge per block. Faster, and slightly less accurate.
        """
        self.batch_size = check_int("batch_size", batch_size, minimum=1, maximum=MAX_BATCH_SIZE)
        self.loaded = load_model(source, device=device, precision=precision, image_size=image_size, merge=merge)
        self.labels = self.loaded.labels
        self.novelty = _read_novelty(self.loaded)
        self._name = "a Checkpoint" if isinstance(source, Checkpoint) else str(source)

    def __repr__(self) -> str:
        size = " x ".join(map(str, self.loaded.model.config.image_hw))
        return f"<Predictor of {self._name}: {len(self.labels)} labels, images of {size}, on {self.loaded.device}>"

    @overload
    def __call__(self, images: "bytes | Image | np.ndarray | Tensor") -> Prediction: ...
    @overload
    def __call__(self, images: str | Path) -> Prediction | Any: ...  # noqa: ANN401 (a list for a folder)
    @overload
    def __call__(self, images: "Sequence[ImageInput]") -> list[Prediction]: ...
    def __call__(self, images: "ImageInput | Sequence[ImageInput]") -> Prediction | list[Prediction]:
        """Return the Prediction of an image, or a list of them for a list of images or a folder.

        The images of a folder and the folders below it are sorted by name. Raise DataError if an image is unusable;
        use `stream` to continue after such images.
        """
        is_many = isinstance(images, list | tuple) or _is_folder(images)
        predictions: list[Prediction] = []
        for image, result in self.stream(cast("Sequence[ImageInput]", images if is_many else [images])):
            if isinstance(result, Failure):
                name = image if isinstance(image, str | Path) else f"an image ({type(image).__name__})"
                raise DataError(f"Cannot use {name}: {result.reason}.")
            predictions.append(result)
        return predictions if is_many else predictions[0]

    def stream(self, images: "Iterable[AnyInput] | str | Path") -> "Iterator[tuple[AnyInput, Prediction | Failure]]":
        """Yield each image (of an iterable or a folder) with its Prediction, or a Failure if unusable, in order."""
        self.loaded.check_has_head()
        yield from self._stream(images, self._predict)

    def features(self, images: "Iterable[AnyInput] | str | Path") -> "Iterator[tuple[AnyInput, np.ndarray | Failure]]":
        """Yield each image with its embedding (D,), or with a Failure, as `stream` does."""
        yield from self._stream(images, lambda batch: self.loaded.check_finite(self.loaded.features(batch)).numpy())

    def preprocessed(self, images: "Iterable[AnyInput] | str | Path") -> "Iterator[tuple[AnyInput, Tensor | Failure]]":
        """Yield each image as uint8 (C, H, W), the model's input before normalization, or with a Failure."""
        yield from self._stream(images, lambda batch: batch)

    def predict_prepared(self, images: Sequence[Tensor]) -> list[Prediction]:
        """Return a prediction per image of one batch: uint8 (C, H, W) as `preprocess_image` returns them."""
        return self._predict(_stack(images))

    def features_prepared(self, images: Sequence[Tensor]) -> np.ndarray:
        """Return the embeddings (B, D) of one batch of images, as `predict_prepared` takes them."""
        return self.loaded.check_finite(self.loaded.features(_stack(images))).numpy()

    def check_can_reject(self) -> None:
        """Raise ConfigError if the model cannot measure how unusual an image is."""
        if self.novelty is None:
            problem = f"{self._name} has no statistics of its training images, which --reject needs."
            raise ConfigError(problem, hint="Pass the folder of a run that this version of `vitral train` finished.")

    def _predict(self, images: Images) -> list[Prediction]:
        """Return a prediction per image, from one forward pass."""
        unusual: list[float] | None = None
        if self.novelty is None:
            logits = self.loaded.logits(images)
        else:
            features = self.loaded.features(images)
            unusual = [float(value) for value in self.novelty.score(self.loaded.check_finite(features)).numpy()]
            logits = self.loaded.classify(features)
        rows = self.loaded.probabilities(self.loaded.check_finite(logits)).numpy()
        best: list[int] = rows.argmax(1).tolist()
        return [
            Prediction(
                label=self.labels[index],
                probability=float(rows[number, index]),
                labels=self.labels,
                probabilities=row,
                unusual=None if unusual is None else unusual[number],
            )
            for number, (row, index) in enumerate(zip(rows, best, strict=True))
        ]

    def _stream(
        self, images: "Iterable[AnyInput] | str | Path", compute: Callable[[Images], "Iterable[Output]"]
    ) -> "Iterator[tuple[AnyInput, Output | Failure]]":
        if isinstance(images, str | Path):
            listed = find_images([str(images)], ()) if _is_folder(images) else [str(images)]
            images = cast("Iterable[AnyInput]", listed)
        remaining = iter(images)
        while batch := list(islice(remaining, self.batch_size)):
            inputs = [self._preprocess(image) for image in batch]
            usable = [image for image in inputs if isinstance(image, Tensor)]
            outputs = iter(compute(_stack(usable)) if usable else ())
            for image, preprocessed in zip(batch, inputs, strict=True):
                yield image, preprocessed if isinstance(preprocessed, Failure) else next(outputs)

    def _preprocess(self, image: object) -> Tensor | Failure:
        """Return uint8 (C, H, W), the model's input before normalization."""
        from PIL.Image import Image

        preprocess = self.loaded.preprocess
        try:
            if isinstance(image, str | Path):
                content = FileSource(str(image)).read()
            elif isinstance(image, bytes):
                content = image
            elif isinstance(image, Image):
                content = from_pillow(image, preprocess.channels, background=preprocess.background)
            elif isinstance(image, np.ndarray):
                content = from_array(cast(np.ndarray, image), preprocess.channels, background=preprocess.background)
            elif isinstance(image, Tensor):
                array = _as_array(image)
                content = from_array(array, preprocess.channels, background=preprocess.background)
            else:
                expected = "a path, bytes, a PIL image, an array (H, W, C) or a uint8 tensor (C, H, W)"
                raise DataError(f"Expected {expected}, got {type(image).__name__}.")
            return preprocess_image(content, preprocess, patch=self.loaded.model.config.step_hw).contiguous()
        except BadImageError as error:
            return Failure(reason=str(error))


def _read_novelty(model: LoadedModel) -> Novelty | None:
    """Return the statistics that the model's run stored, or None."""
    if model.run is None or not model.run.novelty.is_file():
        return None
    novelty, config = Novelty.load(model.run.novelty), model.model.config
    width = config.representation or config.pooled_width
    if novelty.width != width:
        problem = f"{model.run.novelty} does not fit the model (got {novelty.width} features; expected {width})."
        raise ConfigError(problem, hint="Delete it to predict without `unusual`.")
    return novelty


def _stack(images: Sequence[Tensor]) -> Images:
    """Return (B, C, H, W) for images of one size, else a list."""
    is_one_size = len({image.shape for image in images}) == 1
    return torch.stack(list(images)) if is_one_size else list(images)


def _as_array(image: Tensor) -> np.ndarray:
    """Return a uint8 tensor (C, H, W) as an array (H, W, C). Raise DataError for other tensors."""
    if image.dtype != torch.uint8 or image.ndim != 3:
        raise DataError(
            f"Expected a uint8 tensor (C, H, W), got {str(image.dtype).removeprefix('torch.')} {tuple(image.shape)}.",
            hint="Pass pixels from 0 to 255 before normalization, one image at a time or as a list.",
        )
    return image.detach().cpu().permute(1, 2, 0).numpy()


def _is_folder(images: object) -> bool:
    return isinstance(images, str | Path) and os.path.isdir(images)
