"""Load a model for inference: a checkpoint on its device, with its preprocessing and labels."""

from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from vitral.data.transforms import normalize
from vitral.devices import choose_device
from vitral.errors import ConfigError, WeightsError, check_choice, check_type
from vitral.inference.engines import Engine, describe_engine
from vitral.inference.engines.torch_eager import as_tensor, computing
from vitral.inference.exported_model import is_exported
from vitral.model.features import Features
from vitral.model.network import Network
from vitral.model.vit import ViT
from vitral.preprocess import Preprocess
from vitral.runs import Run
from vitral.weights.checkpoint import Checkpoint, check_labels
from vitral.weights.load import load

Images = Tensor | list[Tensor]
"""uint8 (B, C, H, W), or a list of (C, H, W) of any sizes."""
PRECISIONS = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A model in evaluation mode on its device."""

    model: Network
    preprocess: Preprocess
    labels: tuple[str, ...]
    """A name per logit; the logit's index if the checkpoint has no names."""
    has_names: bool
    multi_label: bool
    device: torch.device
    precision: str
    run: Run | None
    """The run that the model comes from, if any."""
    warnings: tuple[str, ...] = ()
    """Warnings about the checkpoint, such as a config.json that contradicts it."""
    engine: Engine | None = None
    """The engine that computes batches of its size; None for eager torch, which computes everything else."""

    @property
    def computed_by(self) -> str:
        """Return the engine and the precision of batches of the model's size."""
        return f"torch {self.precision}" if self.engine is None else describe_engine(self.engine)

    @property
    def step_hw(self) -> tuple[int, int]:
        """Return what the sides of an image must be multiples of."""
        return self.model.config.step_hw

    def logits(self, images: Images) -> Tensor:
        """Return (B, K) logits in float32 on the CPU."""
        if (engine := self._engine_for(images)) is not None:
            return as_tensor(engine.logits(images.numpy()))  # type: ignore[union-attr]
        with self._computing():
            return self.model(to_device(images, self.preprocess, self.device)).float().cpu()

    def features(self, images: Images) -> Tensor:
        """Return (B, D), the input of the head, in float32 on the CPU."""
        self._check_pool()
        if (engine := self._engine_for(images)) is not None:
            return as_tensor(engine.features(images.numpy()))  # type: ignore[union-attr]
        with self._computing():
            features: Features | list[Features] = self.model.features(to_device(images, self.preprocess, self.device))
            pooled = torch.cat([image.pooled for image in features]) if isinstance(features, list) else features.pooled
            return self.model.representation(pooled).float().cpu()

    def tokens(self, images: Tensor, block: int) -> tuple[Tensor, Tensor]:
        """Return the (B, N, D) tokens after a block in bfloat16, and the input of the head, both on the CPU."""
        with self._computing():
            features = self.model.features(normalize(images.to(self.device), self.preprocess), layers=block)
            inner = features.layers[block]
            first = [] if inner.cls is None else [inner.cls[:, None]]
            tokens = torch.cat([*first, inner.registers, inner.patches], dim=1)
            return tokens.bfloat16().cpu(), self.model.representation(features.pooled).float().cpu()

    def lower_tokens(self, images: Tensor, blocks: int, kept: Tensor | None = None) -> Tensor:
        """Return the (B, N, D) tokens after the first blocks in bfloat16 on the CPU.

        `kept` are the (B, N) indices of the tokens to run, for networks whose blocks take any subset of them.
        """
        assert isinstance(self.model, ViT)
        with self._computing():
            x, packing = self.model.embed(normalize(images.to(self.device), self.preprocess))
            if kept is not None:
                x = x.gather(1, kept.to(self.device)[..., None].expand(-1, -1, x.shape[2]))
            return self.model.run_blocks(range(blocks), x, packing)[0].bfloat16().cpu()

    def features_from(self, block: int, tokens: Tensor) -> Tensor:
        """Return (B, D), the input of the head, for (B, N, D) tokens that have passed the blocks before this one."""
        assert isinstance(self.model, ViT)
        grid = self.model.config.grid(*self.model.config.image_hw)
        with self._computing():
            pooled = self.model.pool_from(block, tokens.to(self.device), grid)
            return self.model.representation(pooled).float().cpu()

    def classify(self, features: Tensor) -> Tensor:
        """Return (B, K) logits of `features`, in float32 on the CPU."""
        with self._computing():
            return self.model.head(features.to(self.device)).float().cpu()

    def check_finite(self, outputs: Tensor) -> Tensor:
        """Return the outputs, or raise WeightsError if any is NaN or Inf."""
        if outputs.isfinite().all():
            return outputs
        cause = "" if self.precision == "float32" else f", or overflow in {self.precision}"
        problem = f"The model produced NaN or Inf: its weights are damaged or too large{cause}."
        raise WeightsError(problem, hint="Inspect the file with `vitral describe`.")

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return (B, K) probabilities: a softmax, or a sigmoid per label for multi-label models."""
        return logits.sigmoid() if self.multi_label else logits.softmax(dim=1)

    def check_has_head(self) -> None:
        """Raise ConfigError if the model has features but no predictions."""
        if not self.model.config.num_classes:
            hint = "Use its features: vitral evaluate MODEL DATA --knn 10, or vitral features MODEL IMAGES."
            raise ConfigError("This model has no classification head.", hint=hint)
        self._check_pool()

    def _check_pool(self) -> None:
        if self.model.config.pool == "none":
            raise ConfigError("This model outputs one vector per token (pool='none'), not one per image.")

    def _engine_for(self, images: Images) -> Engine | None:
        """Return the engine if it takes these images."""
        is_batch = isinstance(images, Tensor) and self.engine is not None
        return self.engine if is_batch and self.engine.size == tuple(images.shape[2:]) else None  # type: ignore[union-attr]

    def _computing(self) -> AbstractContextManager[None]:
        return computing(self.device, self.precision)


def to_device(images: Images, preprocess: Preprocess, device: torch.device) -> Images:
    """Move the images to the device and normalize them there."""
    if isinstance(images, Tensor):
        return normalize(images.to(device), preprocess)
    return [normalize(image.to(device), preprocess) for image in images]


def load_model(
    source: str | Path | Checkpoint,
    *,
    device: str = "auto",
    precision: str = "float32",
    image_size: int | tuple[int, int] | None = None,
    merge: int | None = None,
    verify: bool | Literal["once"] = "once",
) -> LoadedModel:
    """Load a model from a run folder, a weights file, a shipped or pretrained name, ``hf:owner/name``, or a Checkpoint.

    Results in float32 are the same on every machine. ``merge`` replaces the model's own ViTConfig.merge. ``verify``
    checks the SHA-256 in files of our own format; "once" skips files that passed before.
    """
    check_choice("precision", precision, PRECISIONS)
    target = torch.device(choose_device(device).value)
    checkpoint, run = open_checkpoint(source, image_size, merge=merge, verify=verify)
    model, classes = checkpoint.model, checkpoint.model.config.num_classes
    if checkpoint.labels is not None:
        check_labels(checkpoint.labels, classes)  # reset_head changes the classes of the model in place
    if isinstance(source, Checkpoint) and not _runs_unchanged(model, target):
        model = deepcopy(model)  # the caller's model may be in the middle of training
    return LoadedModel(
        model=model.float().eval().to(target),
        preprocess=checkpoint.preprocess,
        labels=checkpoint.labels or tuple(str(index) for index in range(classes)),
        has_names=checkpoint.labels is not None,
        multi_label=checkpoint.multi_label,
        device=target,
        precision=precision,
        run=run,
        warnings=() if checkpoint.report is None else checkpoint.report.warnings,
    )


def open_checkpoint(
    source: str | Path | Checkpoint,
    image_size: int | tuple[int, int] | None = None,
    *,
    merge: int | None = None,
    verify: bool | Literal["once"] = True,
) -> tuple[Checkpoint, Run | None]:
    """Return the checkpoint after verifying its checksum, and the run that it comes from, if any."""
    if isinstance(source, Checkpoint):
        if merge not in (None, getattr(source.model.config, "merge", 0)):
            raise ConfigError(f"merge={merge} needs a model to load.", hint=f"Use vitral.load(..., merge={merge}).")
        if image_size is None or source.model.config.image_hw in (image_size, (image_size, image_size)):
            return source, None
        height, width = source.model.config.image_hw
        hint = f"Use vitral.load(..., image_size={image_size})."
        raise ConfigError(f"This Checkpoint has the image size {height} x {width}.", hint=hint)
    if is_exported(source):
        hint = "Pass the checkpoint that it was exported from. `predict` and `evaluate` take exported files."
        raise WeightsError(f"{source} is an exported file, which this command does not take.", hint=hint)
    hint = "Pass a run folder, a weights file, a name or a Checkpoint."
    check_type("A model", source, str, Path, Checkpoint, hint=hint)
    run = Run.open(Path(source)) if not str(source).startswith("hf:") and Run.is_run(Path(source)) else None
    overrides: dict[str, Any] = {"image_size": image_size, "merge": merge}
    overrides = {name: value for name, value in overrides.items() if value is not None}
    return load(run.trained_model() if run else source, verify=verify, **overrides), run


def _runs_unchanged(model: Network, device: torch.device) -> bool:
    """Return whether the model is in evaluation mode, in float32 and on the device."""
    return not model.training and all(
        tensor.dtype == torch.float32
        and tensor.device.type == device.type
        and device.index in (None, tensor.device.index)
        for tensor in model.parameters()
    )
