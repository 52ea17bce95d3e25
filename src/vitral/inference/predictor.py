"""Predict labels of images with the same preprocessing and the same numbers as `vitral evaluate`.

Worker threads decode and resize the next images while the model computes a batch. Exported files run without torch.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

import numpy as np

from vitral.data.dataset import FileSource
from vitral.data.decode import BadImageError, from_array, from_pillow
from vitral.data.headers import Pixels
from vitral.data.prefetch import load_ahead, loading_threads
from vitral.data.sources.image_files import find_images
from vitral.errors import ConfigError, DataError, check_int
from vitral.inference.engines import Gate
from vitral.inference.exported_model import ExportedModel, check_not_merged, is_exported, open_exported
from vitral.inference.prediction import Failure as Failure
from vitral.inference.prediction import Prediction as Prediction

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from vitral.inference.loaded_model import LoadedModel
    from vitral.inference.novelty import Novelty
    from vitral.inference.torch_backend import TorchBackend
    from vitral.weights.checkpoint import Checkpoint

    ImageInput = str | Path | bytes | Image | np.ndarray | Tensor

MAX_BATCH_SIZE = 2**31
AnyInput = TypeVar("AnyInput", bound="ImageInput")
Output = TypeVar("Output")


class Predictor:
    """A model that predicts labels of images.

    An image is a path, the bytes of a file, a PIL image, an array (H, W, C) or (H, W), or a uint8 tensor (C, H, W).
    Several threads may share a Predictor.
    """

    def __init__(
        self,
        source: "str | Path | Checkpoint",
        *,
        device: str = "auto",
        engine: str = "auto",
        precision: str = "auto",
        batch_size: int = 32,
        image_size: int | tuple[int, int] | None = None,
        merge: int | None = None,
        gate: Gate = Gate(),  # noqa: B008 (frozen)
        calibration: str | Path | None = None,
        on_choice: Callable[[str], None] = lambda reason: None,
    ):
        """Load the model.

        Args:
            source: a run folder, a weights file, an ONNX or OpenVINO file of `vitral.export`, a shipped or pretrained
                name, ``hf:owner/name``, or a Checkpoint.
            device: cpu, cuda, cuda:1, mps or auto.
            engine: torch, compiled, onnxruntime or openvino. auto is torch for a few images; for many, it measures the
                installed engines once and takes the fastest that agrees with float32 torch.
            precision: float32, bfloat16, float16 or int8; auto is float32, or bfloat16 where an engine measures it
                faster.
            batch_size: images per batch.
            image_size: another input size than the model was trained at.
            merge: pairs of similar tokens to merge per block. Faster, and slightly less accurate.
            gate: the agreement with float32 torch that other engines and precisions need.
            calibration: a folder or dataset to quantize the model with for int8; by default the data of its run.
            on_choice: called with a line about the engine that was chosen, and while a model is quantized.
        """
        self.batch_size = check_int("batch_size", batch_size, minimum=1, maximum=MAX_BATCH_SIZE)
        self._name = str(source) if isinstance(source, str | Path) else "a Checkpoint"
        if isinstance(source, str | Path) and is_exported(source):
            check_not_merged(merge)
            options: dict[str, Any] = dict(engine=engine, precision=precision, image_size=image_size, device=device)
            self._backend: TorchBackend | ExportedModel = open_exported(source, **options)
        else:
            from vitral.inference import torch_backend

            self._backend = torch_backend.TorchBackend(
                source,
                device=device,
                engine=engine,
                precision=precision,
                batch_size=self.batch_size,
                image_size=image_size,
                merge=merge,
                gate=gate,
                calibration=calibration,
                on_choice=on_choice,
            )
        self.labels = self.loaded.labels

    def __repr__(self) -> str:
        size = " x ".join(map(str, self.loaded.preprocess.size))
        return f"<Predictor of {self._name}: {len(self.labels)} labels, images of {size}, by {self.engine}>"

    @property
    def loaded(self) -> "LoadedModel | ExportedModel":
        """Return the model that runs."""
        return self._backend if isinstance(self._backend, ExportedModel) else self._backend.loaded

    @property
    def engine(self) -> str:
        """Return the engine and the precision that compute the next batch, such as "openvino bfloat16"."""
        return self.loaded.computed_by

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
        yield from self._stream(images, self._backend.embed)

    @property
    def novelty(self) -> "Novelty | None":
        """Return the statistics of the training images, if the model has them."""
        return None if isinstance(self._backend, ExportedModel) else self._backend.novelty

    @property
    def may_round(self) -> bool:
        """Return whether some of the runs with these options compute in a lower precision than float32."""
        return isinstance(self._backend, ExportedModel) or self._backend.may_round

    @property
    def feature_width(self) -> int:
        """Return the width of an embedding."""
        if isinstance(self._backend, ExportedModel):
            return 0
        config = self._backend.loaded.model.config
        return config.representation or config.pooled_width

    def preprocessed(self, images: "Iterable[AnyInput] | str | Path") -> "Iterator[tuple[AnyInput, Tensor | Failure]]":
        """Yield each image as uint8 (C, H, W), the model's input before normalization, or with a Failure."""
        from vitral.inference.engines.torch_eager import as_tensor

        yield from self._stream(images, lambda batch: map(as_tensor, batch))

    @property
    def can_predict(self) -> bool:
        """Return whether the model has a classification head."""
        try:
            self.loaded.check_has_head()
        except ConfigError:
            return False
        return True

    def prepare(self, content: bytes) -> np.ndarray:
        """Return an encoded image as uint8 (C, H, W), the model's input. Raise BadImageError if it is unusable."""
        return self._backend.prepare(content)

    def predict_prepared(self, images: Sequence[np.ndarray]) -> list[Prediction]:
        """Return a prediction per image of one batch: uint8 (C, H, W) as `prepare` returns them."""
        return self._predict(list(images))

    def features_prepared(self, images: Sequence[np.ndarray]) -> np.ndarray:
        """Return the embeddings (B, D) of one batch of images, as `predict_prepared` takes them."""
        return self._backend.embed(list(images))

    def choose_engine(self, images: Sequence[np.ndarray], *, total: int) -> None:
        """Measure engines on images as `prepare` returns them, if computing `total` of them would pay for that.

        `stream` does the same on its first batch; this is for those who get images one by one.
        """
        self._backend.choose(list(images), total)

    def check_can_reject(self) -> None:
        """Raise ConfigError if the model cannot measure how unusual an image is."""
        if self.novelty is None:
            problem = f"{self._name} has no statistics of its training images, which --reject needs."
            raise ConfigError(problem, hint="Pass the folder of a run that this version of `vitral train` finished.")

    def _predict(self, images: list[np.ndarray]) -> list[Prediction]:
        """Return a prediction per image, from one forward pass."""
        rows, unusual = self._backend.predict(images)
        best: list[int] = rows.argmax(1).tolist()
        return [
            Prediction(
                label=self.labels[index],
                probability=float(rows[number, index]),
                labels=self.labels,
                probabilities=row,
                unusual=None if unusual is None else unusual[number],
                engine=self.engine,
            )
            for number, (row, index) in enumerate(zip(rows, best, strict=True))
        ]

    def _stream(
        self, images: "Iterable[AnyInput] | str | Path", compute: Callable[[list[np.ndarray]], "Iterable[Output]"]
    ) -> "Iterator[tuple[AnyInput, Output | Failure]]":
        if isinstance(images, str | Path):
            listed = find_images([str(images)], ()) if _is_folder(images) else [str(images)]
            images = cast("Iterable[AnyInput]", listed)
        total = len(images) if isinstance(images, Sequence) else 0
        for batch in self._load_batches(images, is_known=total > 0):
            usable = [image for _, image in batch if not isinstance(image, Failure)]
            if usable:
                self._backend.choose(usable, total)
            outputs = iter(compute(usable) if usable else ())
            for image, preprocessed in batch:
                yield image, preprocessed if isinstance(preprocessed, Failure) else next(outputs)

    def _load_batches(
        self, images: "Iterable[AnyInput]", *, is_known: bool
    ) -> "Iterator[list[tuple[AnyInput, np.ndarray | Failure]]]":
        """Yield batches of preprocessed images.

        While one is computed, threads load the next. From an iterator, whose images may not exist yet, no image is
        requested before its batch begins.
        """
        threads, size = loading_threads(), self.batch_size
        if is_known:
            has_many = len(cast("Sequence[AnyInput]", images)) > 1
            loaded = load_ahead(images, self.preprocess, threads=threads if has_many else 0, ahead=size)
            while batch := list(islice(loaded, size)):
                yield batch
            return
        remaining = iter(images)
        while chunk := list(islice(remaining, size)):
            threads = min(threads, len(chunk)) if len(chunk) > 1 else 0
            yield list(load_ahead(chunk, self.preprocess, threads=threads, ahead=len(chunk)))

    def preprocess(self, image: object) -> "np.ndarray | Failure":
        """Return uint8 (C, H, W), the model's input before normalization."""
        try:
            return self._backend.prepare(self._read(image))
        except BadImageError as error:
            return Failure(reason=str(error))

    def _read(self, image: object) -> bytes | Pixels:
        from PIL.Image import Image

        preprocess = self.loaded.preprocess
        options: dict[str, Any] = dict(channels=preprocess.channels, background=preprocess.background)
        if isinstance(image, str | Path):
            return FileSource(str(image)).read()
        if isinstance(image, bytes):
            return image
        if isinstance(image, Image):
            return from_pillow(image, **options)
        if isinstance(image, np.ndarray):
            return from_array(cast(np.ndarray, image), **options)
        if _is_tensor(image):
            return from_array(_as_array(cast("Tensor", image)), **options)
        expected = "a path, bytes, a PIL image, an array (H, W, C) or a uint8 tensor (C, H, W)"
        raise DataError(f"Expected {expected}, got {type(image).__name__}.")


def _is_tensor(image: object) -> bool:
    torch = sys.modules.get("torch")  # without torch, nobody has a tensor
    return torch is not None and isinstance(image, torch.Tensor)


def _as_array(image: "Tensor") -> np.ndarray:
    """Return a uint8 tensor (C, H, W) as an array (H, W, C). Raise DataError for other tensors."""
    if str(image.dtype) != "torch.uint8" or image.ndim != 3:
        raise DataError(
            f"Expected a uint8 tensor (C, H, W), got {str(image.dtype).removeprefix('torch.')} {tuple(image.shape)}.",
            hint="Pass pixels from 0 to 255 before normalization, one image at a time or as a list.",
        )
    return image.detach().cpu().permute(1, 2, 0).numpy()


def _is_folder(images: object) -> bool:
    return isinstance(images, str | Path) and os.path.isdir(images)
