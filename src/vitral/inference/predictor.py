"""Predictor: pictures in, labels out. The same preprocessing and numbers as evaluation and the command."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np
import torch
from torch import Tensor

from vitral.data.dataset import FileSource
from vitral.data.decode import BadImageError, from_array, from_pillow
from vitral.data.transforms import prepare
from vitral.errors import ConfigError, DataError
from vitral.inference.loaded_model import Images, load_model
from vitral.weights.checkpoint import Checkpoint

if TYPE_CHECKING:
    from PIL.Image import Image

    Picture = str | Path | bytes | Image | np.ndarray
    Each = TypeVar("Each", bound=Picture)


@dataclass(frozen=True, kw_only=True, eq=False)
class Prediction:
    """What a model says about one picture."""

    label: str
    """The most probable one."""
    probability: float
    labels: tuple[str, ...] = field(repr=False)
    probabilities: np.ndarray = field(repr=False)
    """(K,): of each label; they add up to 1, unless a picture may have several labels."""

    def top(self, k: int = 5) -> list[tuple[str, float]]:
        """The k most probable labels, the first one first."""
        if not isinstance(k, int) or k < 1:
            raise ConfigError(f"top={k!r} must be a whole number of at least 1.")
        order = np.argsort(-self.probabilities, kind="stable")[:k]
        return [(self.labels[place], float(self.probabilities[place])) for place in order]


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A picture that cannot be used."""

    reason: str


class Predictor:
    """A model that answers about pictures: a path, the bytes of a file, a Pillow image, an array (H, W, C), or a list
    of them."""

    def __init__(
        self,
        source: str | Path | Checkpoint,
        *,
        device: str = "auto",
        precision: str = "float32",
        batch_size: int = 32,
        image_size: int | tuple[int, int] | None = None,
    ):
        if not isinstance(batch_size, int) or batch_size < 1:
            raise ConfigError(f"batch_size={batch_size!r} must be a whole number of at least 1.")
        self.ready = load_model(source, device=device, precision=precision, image_size=image_size)
        self.batch_size = batch_size
        self.labels = self.ready.labels
        self._name = "a Checkpoint" if isinstance(source, Checkpoint) else str(source)

    def __repr__(self) -> str:
        size = " x ".join(map(str, self.ready.model.config.image_hw))
        return f"<Predictor of {self._name}: {len(self.labels)} labels, pictures of {size}, on {self.ready.device}>"

    @overload
    def __call__(self, pictures: "Picture") -> Prediction: ...
    @overload
    def __call__(self, pictures: "Sequence[Picture]") -> list[Prediction]: ...
    def __call__(self, pictures: Any) -> Prediction | list[Prediction]:
        """One Prediction, or one for each of a list; DataError when a picture cannot be used."""
        is_many = isinstance(pictures, list | tuple)
        found: list[Prediction] = []
        for picture, told in self.stream(pictures if is_many else [pictures]):
            if isinstance(told, Failure):
                seen = picture if isinstance(picture, str | Path) else f"A picture ({type(picture).__name__})"
                raise DataError(f"{seen} cannot be used: {told.reason}.")
            found.append(told)
        return found if is_many else found[0]

    def stream(self, pictures: "Iterable[Each]") -> "Iterator[tuple[Each, Prediction | Failure]]":
        """Each picture with what was found, in order, batch by batch; a bad one does not disturb the others."""
        self.ready.check_answers()
        for picture, told in self._stream(pictures, lambda images: self.ready.probabilities(self.ready.logits(images))):
            yield picture, told if isinstance(told, Failure) else self._prediction(told)

    def features(self, pictures: "Iterable[Each]") -> "Iterator[tuple[Each, np.ndarray | Failure]]":
        """Each picture with its embedding (D,), in order."""
        for picture, told in self._stream(pictures, self.ready.features):
            yield picture, told if isinstance(told, Failure) else told.numpy()

    def _prediction(self, probabilities: Tensor) -> Prediction:
        best = int(probabilities.argmax())
        return Prediction(
            label=self.labels[best],
            probability=probabilities[best].item(),
            labels=self.labels,
            probabilities=probabilities.numpy(),
        )

    def _stream(self, pictures: Iterable[Any], compute: Any) -> Iterator[tuple[Any, Tensor | Failure]]:
        waiting = iter(pictures)
        while batch := list(islice(waiting, self.batch_size)):
            prepared = [self._prepare(picture) for picture in batch]
            good = [image for image in prepared if isinstance(image, Tensor)]
            rows = iter(self.ready.check_finite(compute(_stacked(good))) if good else ())
            for picture, image in zip(batch, prepared, strict=True):
                yield picture, image if isinstance(image, Failure) else next(rows)

    def _prepare(self, picture: Any) -> Tensor | Failure:
        """uint8 (C, H, W), as the network sees it."""
        how = self.ready.preprocess
        convert = partial(prepare, preprocess=how, patch=self.ready.model.config.step_hw)
        try:
            if isinstance(picture, str | Path):
                return convert(FileSource(str(picture)).read()).contiguous()
            if isinstance(picture, bytes):
                return convert(picture).contiguous()
            from PIL.Image import Image

            if isinstance(picture, Image):
                return convert(from_pillow(picture, how.channels, background=how.background)).contiguous()
            if isinstance(picture, np.ndarray):
                return convert(from_array(picture, how.channels, background=how.background)).contiguous()
        except BadImageError as error:
            return Failure(reason=str(error))
        raise DataError(
            f"A picture is a path, bytes, a Pillow image or an array (H, W, C), and this is {type(picture).__name__}."
        )


def _stacked(images: list[Tensor]) -> Images:
    return torch.stack(images) if len({image.shape for image in images}) == 1 else images
