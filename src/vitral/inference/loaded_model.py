"""A checkpoint on its device, ready to answer: what evaluation, prediction and features all begin with."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitral.data.transforms import normalize
from vitral.devices import choose_device
from vitral.errors import ConfigError, WeightsError
from vitral.model.network import Network
from vitral.preprocess import Preprocess
from vitral.runs import Run
from vitral.weights.checkpoint import Checkpoint
from vitral.weights.load import load

Images = Tensor | list[Tensor]
"""uint8 (B, C, H, W), or a list of (C, H, W) of any sizes."""


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    model: Network
    preprocess: Preprocess
    labels: tuple[str, ...]
    """A name for each logit; its number, where the checkpoint has none."""
    has_names: bool
    multi_label: bool
    device: torch.device
    precision: str
    run: Run | None
    """The run that it came from, if it did."""

    def logits(self, images: Images) -> Tensor:
        """(B, K) in float32, on the CPU."""
        with self._computing():
            return self.model(to_device(images, self.preprocess, self.device)).float().cpu()

    def features(self, images: Images) -> Tensor:
        """(B, D): what the head sees, in float32, on the CPU."""
        self._check_pool()
        with self._computing():
            found: Any = self.model.features(to_device(images, self.preprocess, self.device))
            pooled = torch.cat([one.pooled for one in found]) if isinstance(found, list) else found.pooled
            return self.model.representation(pooled).float().cpu()

    @property
    def feature_width(self) -> int:
        return self.model.config.representation or self.model.config.width

    def check_finite(self, rows: Tensor) -> Tensor:
        """The rows themselves; WeightsError for a network whose numbers overflow."""
        if rows.isfinite().all():
            return rows
        raise WeightsError(
            "The network's answers are no finite numbers: its weights are too large or damaged"
            f"{'' if self.precision == 'float32' else f', or {self.precision} is too small for them'}.",
            hint="`vitral describe` looks at the file.",
        )

    def probabilities(self, logits: Tensor) -> Tensor:
        return logits.sigmoid() if self.multi_label else logits.softmax(dim=1)

    def check_answers(self) -> None:
        """ConfigError for a model that has no answers."""
        if not self.model.config.num_classes:
            raise ConfigError(
                "This model has no head, so it has features and no answers.",
                hint="vitral evaluate RUN DATA --knn 10 measures them, vitral features RUN PICTURES writes them.",
            )
        self._check_pool()

    def _check_pool(self) -> None:
        if self.model.config.pool == "none":
            raise ConfigError("This model answers for every token (pool='none'), not for a picture.")

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Without gradients, in the precision that was asked for."""
        is_lower = self.precision != "float32"
        dtype = getattr(torch, self.precision) if is_lower else torch.bfloat16
        with torch.inference_mode(), torch.autocast(self.device.type, dtype=dtype, enabled=is_lower):
            yield


def to_device(images: Images, preprocess: Preprocess, device: torch.device) -> Images:
    """Normalised, where the model is."""
    if isinstance(images, Tensor):
        return normalize(images.to(device), preprocess)
    return [normalize(image.to(device), preprocess) for image in images]


def answers_as_it_is(model: Network, device: torch.device) -> bool:
    def is_there(tensor: Tensor) -> bool:
        same = tensor.device.type == device.type and device.index in (None, tensor.device.index)
        return same and tensor.dtype == torch.float32

    return not model.training and all(map(is_there, model.parameters()))


def load_model(
    source: str | Path | Checkpoint,
    *,
    device: str = "auto",
    precision: str = "float32",
    image_size: int | tuple[int, int] | None = None,
) -> LoadedModel:
    """From a run folder, a weights file, the name of a shipped model, ``hf:owner/name``, or a Checkpoint.

    Answers are computed in float32 unless another precision is asked for, so that they are the same everywhere.
    ``image_size`` is another one than the model was trained at."""
    if precision not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"precision={precision!r} must be float32, bfloat16 or float16.")
    place = torch.device(choose_device(device).value)
    checkpoint, run = open_checkpoint(source, image_size)
    model, classes = checkpoint.model, checkpoint.model.config.num_classes
    if isinstance(source, Checkpoint) and not answers_as_it_is(model, place):
        model = deepcopy(model)  # somebody's, who may be in the middle of training it
    return LoadedModel(
        model=model.float().eval().to(place),
        preprocess=checkpoint.preprocess,
        labels=checkpoint.labels or tuple(str(number) for number in range(classes)),
        has_names=checkpoint.labels is not None,
        multi_label=checkpoint.multi_label,
        device=place,
        precision=precision,
        run=run,
    )


def open_checkpoint(
    source: str | Path | Checkpoint, image_size: int | tuple[int, int] | None = None
) -> tuple[Checkpoint, Run | None]:
    """The checkpoint, and the run that it came from, if it did."""
    if isinstance(source, Checkpoint):
        if image_size is None or source.model.config.image_hw in (image_size, (image_size, image_size)):
            return source, None
        raise ConfigError("A Checkpoint has its size.", hint=f"vitral.load(..., image_size={image_size})")
    if not isinstance(source, str | Path):
        raise ConfigError(f"A model is a run folder, a weights file or a Checkpoint, and this is {source!r}.")
    is_run = not str(source).startswith("hf:") and Run.is_run(Path(source))
    run = Run.open(Path(source)) if is_run else None
    size: dict[str, Any] = {} if image_size is None else {"image_size": image_size}
    return load(run.trained_model() if run else source, **size), run
