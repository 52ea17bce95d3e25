"""Masked patch prediction (appendix B.1.2): half of the patch embeddings are corrupted, and the network predicts the
colors of the originals.

    pixels -> targets of every patch          images -> patch embeddings -> corrupted -> encoder -> predictions
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from math import nan
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from vitral.collectives import gather
from vitral.data.batches import Batch, BatchLoader, ImageDataset
from vitral.data.dataset import Item
from vitral.data.randomness import BATCH_SAMPLE, random_generator
from vitral.data.transforms import normalize
from vitral.errors import ConfigError, DataError
from vitral.evaluation.metrics import Scores
from vitral.model.config import ViTConfig
from vitral.model.layers import Linear
from vitral.model.network import Network
from vitral.model.packing import arrange
from vitral.model.patches import cut
from vitral.model.vit import ViT
from vitral.preprocess import Preprocess
from vitral.runs import Run
from vitral.training.config import Masking, ResolvedConfig
from vitral.training.events import Event, Measuring
from vitral.training.sharding import root_of, run_with
from vitral.training.tasks import Corruption, Measurement, PreparedBatch
from vitral.training.tasks.masked_sheet import MAX_ROWS, PatchSheet
from vitral.training.token_loader import Loader

LEVELS = 8
"""Levels per channel: 3 bits."""
CELLS = 4
"""Side of a downsized patch."""
_MEASURING_STEP = 2**23
"""First of the steps whose corruption is used for measuring, always the same; 40 bits higher they must fit into 64."""


class MaskedPatchPrediction:
    """The Task of learning from images alone."""

    def __init__(self, model: Network, preprocess: Preprocess, config: ResolvedConfig):
        if not isinstance(model, ViT):
            raise ConfigError("objective=masked-patches hides patches, but a BiT has none.", hint="Use a ViT.")
        if preprocess.resize == "native":
            raise ConfigError("objective=masked-patches needs images of one size.", hint="Use resize=crop.")
        if config.mix.mixup or config.mix.cutmix:
            raise ConfigError("objective=masked-patches does not mix images.", hint="Leave mix out.")
        self.model, self.preprocess, self.config = model, preprocess, config
        self.device = torch.device(config.device)
        self.grid = model.config.grid(*model.config.image_hw)
        self.extra = MaskedPatchHead(model.config, config.masking).to(self.device)
        self.compile_network(config.compile)

    def compile_network(self, is_compiled: bool) -> None:
        """Train with the compiled network, or with the eager one."""
        self.is_compiled = is_compiled
        predict = self.extra.predict
        self.predict: Callable[..., Tensor] = torch.compile(predict) if is_compiled else predict  # pyright: ignore[reportUnknownMemberType]

    def prepare(self, batch: Batch, step: int) -> PreparedBatch:
        whole = batch.whole
        part = slice(whole.start, whole.start + len(batch.items))
        assert isinstance(batch.images, Tensor)
        pixels = batch.images.to(self.device)
        images = normalize(pixels, self.preprocess)
        seed = int(random_generator(self.config.seed, step, BATCH_SAMPLE).integers(2**62))
        generator = torch.Generator().manual_seed(seed)
        drawn = draw_corruption(whole.size, self.grid[0] * self.grid[1], self.config.masking, generator)
        corruption = Corruption(*(tensor[part].to(self.device) for tensor in drawn))
        targets = select_patches(self.extra.targets(pixels, images), corruption.corrupted)
        return PreparedBatch(images, targets, corruption, whole=whole.items)

    def forward(self, batch: PreparedBatch, part: slice) -> Tensor:
        return self._predict(self.model, batch, part)

    def _predict(self, model: ViT, batch: PreparedBatch, part: slice) -> Tensor:
        assert batch.corruption is not None
        corruption = Corruption(*(tensor[part] for tensor in batch.corruption))
        return run_with(model, self.predict, model, batch.images[part], corruption)

    def loss(self, outputs: Tensor, batch: PreparedBatch, part: slice) -> Tensor:
        return (
            self.extra.loss(outputs, batch.targets[part])
            * len(outputs)
            / len(batch if batch.whole is None else batch.whole)
        )

    def measure(self, model: Network, loader: Loader, split: str) -> Generator[Event, None, Measurement]:
        """Return the loss and the fraction of hidden colors that were predicted, of the same patches every time."""
        correct, images = 0, 0
        losses: dict[int, float] = {}
        """By batch number: they are added up in order, whichever process measured them."""
        hidden = torch.zeros(LEVELS**3, dtype=torch.long)  # patches of each color
        unreadable: list[tuple[str, str]] = []
        for number, batch, prepared, outputs in self._run(model, loader):
            if prepared is not None and outputs is not None:
                losses[number] = self.loss(outputs, prepared, slice(0, len(prepared))).item() * len(prepared)
                correct += int(self.extra.correct(outputs, prepared.targets).sum())
                if not prepared.targets.is_floating_point():
                    hidden += prepared.targets.flatten().cpu().bincount(minlength=len(hidden))
                images += len(prepared)
            unreadable += [(loader.images.items[index].key, reason) for index, reason in batch.bad]
            yield Measuring(what=split, done=images, total=len(loader.images))
        if loader.world > 1:
            shares = gather((losses, correct, images, hidden, unreadable))
            losses = {number: loss for share in shares for number, loss in share[0].items()}
            correct, images = sum(share[1] for share in shares), sum(share[2] for share in shares)
            hidden = torch.stack([share[3] for share in shares]).sum(0)
            unreadable = [bad for share in shares for bad in share[4]]
        if not images:
            raise DataError(f"None of the {len(loader.images)} images can be read.")
        total = int(hidden.sum())
        fraction = correct / total if total else nan
        # A color is predicted or it is not; the log and the curves read a top5 of every run.
        scores = Scores(
            images=images, loss=sum(losses[number] for number in sorted(losses)) / images, top1=fraction, top5=fraction
        )
        most_common = int(hidden.max()) / total if total else None  # the fraction that a constant would reach
        report = {**scores.as_dict(), "target": self.config.masking.target, "most_common": most_common}
        return Measurement(scores=scores, unreadable=unreadable, report=report)

    @torch.inference_mode()
    def _run(self, model: Network, loader: Loader) -> Iterator[tuple[int, Batch, PreparedBatch | None, Tensor | None]]:
        """Yield the number of each batch, the batch, and if it has readable images, what the network makes of them."""
        assert isinstance(model, ViT)
        model.eval()
        dtype = getattr(torch, self.config.precision)
        for index, batch in enumerate(loader.epoch()):
            number = loader.rank + index * loader.world
            is_empty = not len(batch.items)
            if is_empty and root_of(model) is None:
                yield number, batch, None, None
                continue
            prepared = self.prepare(self._example(batch) if is_empty else batch, _MEASURING_STEP + number)
            with torch.autocast(self.device.type, dtype=dtype, enabled=dtype != torch.float32):
                outputs = self._predict_all(model, prepared)
            yield (number, batch, None, None) if is_empty else (number, batch, prepared, outputs.float())

    def _predict_all(self, model: ViT, prepared: PreparedBatch) -> Tensor:
        """Return the predictions for a batch, of as many images at a time as fit into memory.

        The processes of a sharded network run it the same number of times.
        """
        size = -(-len(prepared) // self.config.accumulate)
        starts = range(0, len(prepared), size)
        outputs = [self._predict(model, prepared, slice(start, start + size)) for start in starts]
        if root_of(model) is not None:
            for _ in range(self.config.accumulate - len(starts)):
                self._predict(model, prepared, slice(0, 1))
        return torch.cat(outputs)

    def _example(self, batch: Batch) -> Batch:
        """Return a batch with one black image, for a process of a sharded network that has none."""
        shape = (1, self.model.config.channels, *self.model.config.image_hw)
        items = torch.zeros(1, dtype=torch.long)
        return replace(batch, images=torch.zeros(shape, dtype=torch.uint8), labels=items, items=items)

    def draw(self, model: Network, run: Run, report: dict[str, Any], images: Sequence[Item], *, seconds: float) -> None:
        """Draw hidden patches beside the predictions."""
        sheet = PatchSheet(
            preprocess=self.preprocess, grid=self.grid, cell=self.extra.cell, target=self.config.masking.target
        )
        shown = ImageDataset(take_evenly(images, MAX_ROWS), self.preprocess)
        loader = BatchLoader(images=shown, batch_size=MAX_ROWS, classes=0)
        for _, _, prepared, outputs in self._run(model, loader):
            if prepared is None or outputs is None or prepared.corruption is None:
                continue
            predicted = self.extra.colors(outputs.cpu(), is_prediction=True)
            true = self.extra.colors(prepared.targets.cpu(), is_prediction=False)
            corruption = Corruption(*(tensor.cpu() for tensor in prepared.corruption))
            sheet.draw(prepared.images.cpu(), corruption, predicted, true).save(run.plots / "masked.png")


def draw_corruption(images: int, patches: int, masking: Masking, generator: torch.Generator) -> Corruption:
    """Draw which patches are corrupted, the same number in every image. Swapped ones get another patch of the image."""
    order = torch.rand(images, patches, generator=generator).argsort(dim=1)
    corrupted = order[:, : masking.corrupted_patches(patches)].sort(dim=1).values
    is_corrupted = torch.zeros(images, patches, dtype=torch.bool).scatter(1, corrupted, True)
    kind = torch.rand(images, patches, generator=generator)
    offset = torch.randint(1, max(2, patches), (images, patches), generator=generator)
    swapped = is_corrupted & (kind >= masking.masked) & (kind < masking.masked + masking.swapped)
    itself = torch.arange(patches).expand(images, -1)
    source = torch.where(swapped, (itself + offset) % patches, itself)
    return Corruption(corrupted, is_corrupted & (kind < masking.masked), source)


def select_patches(values: Tensor, indices: Int[Tensor, "B M"]) -> Tensor:
    """(B, N, ...) -> (B, M, ...)."""
    return values[torch.arange(len(values), device=values.device)[:, None], indices]


class MaskedPatchHead(nn.Module):
    """The mask embedding and the head that only this task needs."""

    def __init__(self, config: ViTConfig, masking: Masking):
        super().__init__()
        if config.channels > 3 and masking.target != "pixels":
            raise ConfigError(
                f"masking.target={masking.target} needs colors, but these images have {config.channels} channels.",
                hint="Use masking.target=pixels.",
            )
        self.masking, self.channels = masking, config.channels
        rows, columns = config.grid(*config.image_hw)
        self.cell = config.image_hw[0] // rows, config.image_hw[1] // columns
        check_cells(config, (rows, columns), self.cell, masking)
        outputs = LEVELS**config.channels * (CELLS**2 if masking.target == "small-patch" else 1)
        if masking.target == "pixels":
            outputs = config.channels * self.cell[0] * self.cell[1]
        self.mask = nn.Parameter(torch.zeros(config.width))
        self.head = Linear(config.width, outputs, weight=nn.init.zeros_)
        nn.init.normal_(self.mask, std=0.02)

    def predict(self, model: ViT, images: Float[Tensor, "B C H W"], corruption: Corruption) -> Float[Tensor, "B M _"]:
        """Return the predictions for the corrupted patches."""
        (stack,), packing = arrange(images, model.config, weight=model.patches.project.weight)
        x = model.patches(stack)
        x = x.gather(1, corruption.source[..., None].expand_as(x))
        x = torch.where(corruption.masked[..., None], self.mask.to(x.dtype), x)
        x, _ = model.encode(model.embed_patches([x], packing), packing)
        if model.config.norm_after_pool:  # the encoder has left the norm to the pooling
            x = model.norm(x)
        return self.head(select_patches(x[:, model.config.extra_tokens :], corruption.corrupted))

    def targets(self, pixels: UInt8[Tensor, "B C H W"], images: Float[Tensor, "B C H W"]) -> Tensor:
        """mean-color: (B, N) classes; small-patch: (B, N, 16) classes; pixels: (B, N, C * h * w) normalized values."""
        if self.masking.target == "pixels":
            return cut(images, self.cell).flatten(2)
        patches = cut(pixels.float() / 255, self.cell)
        if self.masking.target == "mean-color":
            return quantize(patches.mean(dim=(3, 4)))
        small = torch.unflatten(F.adaptive_avg_pool2d(patches.flatten(0, 1), CELLS), 0, patches.shape[:2])
        return quantize(small.flatten(3).mT)  # (B, N, C, 16) -> (B, N, 16, C)

    def loss(self, predictions: Float[Tensor, "B M _"], targets: Tensor) -> Tensor:
        """Return the mean over the corrupted patches."""
        if self.masking.target == "pixels":
            return F.mse_loss(predictions.float(), targets)
        return F.cross_entropy(self.color_logits(predictions.float()).flatten(0, -2), targets.flatten())

    def correct(self, predictions: Float[Tensor, "B M _"], targets: Tensor) -> Tensor:
        """Return which colors were predicted; pixels are never exactly correct, so there are none."""
        if self.masking.target == "pixels":
            return torch.zeros(0)
        return (self.color_logits(predictions).argmax(-1) == targets).flatten()

    def color_logits(self, predictions: Float[Tensor, "... _"]) -> Tensor:
        """(..., 512), or (..., 16, 512) for the cells of a small patch."""
        return predictions if self.masking.target == "mean-color" else torch.unflatten(predictions, -1, (CELLS**2, -1))

    def colors(self, values: Tensor, *, is_prediction: bool) -> Tensor:
        """Return predictions or targets (B, M, ...) as what a sheet draws: normalized pixels, or colors from 0 to 1."""
        if self.masking.target == "pixels":
            return values
        classes = self.color_logits(values).argmax(-1) if is_prediction else values
        return color_of(classes, self.channels)


def check_cells(config: ViTConfig, grid: tuple[int, int], cell: tuple[int, int], masking: Masking) -> None:
    """Raise ConfigError if images do not divide into equal cells, or cells are too small for the target."""
    height, width = config.image_hw
    if (grid[0] * cell[0], grid[1] * cell[1]) != config.image_hw:  # a stem rounds up when it halves
        patch = config.shrink * config.patch_hw[0], config.shrink * config.patch_hw[1]
        raise ConfigError(
            f"objective=masked-patches cannot divide {height} x {width} pixels into the {grid[0]} x {grid[1]} equal "
            "cells of this stem.",
            hint=f"Use an image_size of multiples of {patch[0]} x {patch[1]}.",
        )
    if masking.target == "small-patch" and min(cell) < CELLS:
        raise ConfigError(
            f"masking.target=small-patch needs patches of at least {CELLS} x {CELLS} pixels "
            f"(got {cell[0]} x {cell[1]}).",
            hint="Use masking.target=mean-color.",
        )


def quantize(colors: Float[Tensor, "... C"]) -> Int[Tensor, "..."]:
    """Values from 0 to 1 -> one class: 64 r + 8 g + b, each of eight equal bins."""
    bins = (colors * LEVELS).long().clamp(0, LEVELS - 1)
    return (bins * _place_values(colors.shape[-1], colors.device)).sum(-1)


def color_of(classes: Int[Tensor, "..."], channels: int) -> Float[Tensor, "... C"]:
    """Return the center of the bins of a class, from 0 to 1."""
    return (classes[..., None] // _place_values(channels, classes.device) % LEVELS + 0.5) / LEVELS


def _place_values(channels: int, device: torch.device) -> Int[Tensor, "C"]:
    """64, 8, 1 for three channels."""
    return LEVELS ** torch.arange(channels - 1, -1, -1, device=device)


def take_evenly(items: Sequence[Item], count: int) -> tuple[Item, ...]:
    """Return at most `count` items, spread evenly over all."""
    if len(items) <= count:
        return tuple(items)
    return tuple(items[index * len(items) // count] for index in range(count))
