"""Draw masked patch prediction: images, what the network saw, what it predicted, and the truth."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from torch import Tensor

from vitral.model.patches import cut
from vitral.preprocess import Preprocess
from vitral.training.tasks import Corruption

CELL, GAP, MAX_ROWS, TITLE_HEIGHT = 96, 6, 8, 18
TITLES = ("image", "input", "prediction", "target")


def hatching(height: int, width: int) -> Tensor:
    """Return a slanted pattern, which no prediction looks like."""
    diagonals = torch.arange(height)[:, None] + torch.arange(width)
    return torch.where(diagonals % 4 < 2, 0.35, 0.8)


@dataclass(frozen=True, kw_only=True)
class PatchSheet:
    """Draws patches as images."""

    preprocess: Preprocess
    grid: tuple[int, int]
    cell: tuple[int, int]
    """(height, width) of a patch in pixels."""
    target: str

    def draw(self, images: Tensor, corruption: Corruption, predicted: Tensor, true: Tensor) -> Image.Image:
        """Draw a row for each of the first images; `predicted` and `true` are (B, M, ...) of the corrupted patches."""
        rows = min(MAX_ROWS, len(images))
        size = len(TITLES) * (CELL + GAP) + GAP, TITLE_HEIGHT + rows * (CELL + GAP) + GAP
        sheet = Image.new("RGB", size, (255, 255, 255))
        for column, title in enumerate(TITLES):
            ImageDraw.Draw(sheet).text((GAP + column * (CELL + GAP), GAP), title, fill=(90, 90, 90))
        for row in range(rows):
            single = Corruption(*(tensor[row] for tensor in corruption))
            for column, patches in enumerate(self.draw_row(images[row], single, predicted[row], true[row])):
                top_left = GAP + column * (CELL + GAP), TITLE_HEIGHT + GAP + row * (CELL + GAP)
                sheet.paste(self.join_patches(patches), top_left)
        return sheet

    def draw_row(self, image: Tensor, corruption: Corruption, predicted: Tensor, true: Tensor) -> Iterator[Tensor]:
        """Yield (N, C, height, width) from 0 to 1 for each column; uncorrupted patches are pale in the last two."""
        patches = cut(self._denormalize(image)[None], self.cell)[0]
        yield patches
        seen = patches[corruption.source].clone()
        seen[corruption.masked] = hatching(*self.cell)
        yield seen
        for colors in (predicted, true):
            pale = patches * 0.25 + 0.75
            pale[corruption.corrupted] = self._paint(colors)
            yield pale

    def _denormalize(self, values: Tensor) -> Tensor:
        mean, std = (torch.tensor(part)[:, None, None] for part in (self.preprocess.mean, self.preprocess.std))
        return values * std + mean

    def _paint(self, colors: Tensor) -> Tensor:
        """(M, C * h * w) normalized pixels, (M, C) or (M, 16, C) colors -> (M, C, height, width) from 0 to 1."""
        if self.target == "pixels":
            return self._denormalize(torch.unflatten(colors, 1, (-1, *self.cell))).clamp(0, 1)
        cells = colors if colors.ndim == 3 else colors[:, None]
        side = int(cells.shape[1] ** 0.5)
        return F.interpolate(torch.unflatten(cells.mT, 2, (side, side)), size=self.cell, mode="nearest")

    def join_patches(self, patches: Tensor) -> Image.Image:
        x = torch.unflatten(patches, 0, self.grid).permute(2, 0, 3, 1, 4).flatten(3).flatten(1, 2)  # (C, H, W)
        x = x if len(x) == 3 else x[:1].expand(3, -1, -1)
        pixels = (x.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous().numpy()
        return Image.fromarray(pixels).resize((CELL, CELL), Image.Resampling.NEAREST)
