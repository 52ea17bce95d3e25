"""A picture of masked patch prediction: what the network saw, what it says was there, and what was there."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from torch import Tensor

from vitral.model.patches import cut
from vitral.preprocess import Preprocess
from vitral.training.masked_patches import SMALL, Corruption, MaskedPatches, colour_of

CELL, GAP, MOST, HEAD = 96, 6, 8, 18
TITLES = ("picture", "seen", "answer", "truth")


def hatching(height: int, width: int) -> Tensor:
    """A slanted pattern, which no answer can be taken for."""
    places = torch.arange(height)[:, None] + torch.arange(width)
    return torch.where(places % 4 < 2, 0.35, 0.8)


class Painter:
    """From patches to pictures."""

    def __init__(self, extra: MaskedPatches, preprocess: Preprocess, grid: tuple[int, int]):
        self.extra, self.grid = extra, grid
        self.mean, self.std = (torch.tensor(part)[:, None, None] for part in (preprocess.mean, preprocess.std))

    def sheet(self, images: Tensor, corruption: Corruption, answers: Tensor, targets: Tensor) -> Image.Image:
        """A row for each of the first pictures: itself, corrupted, predicted, true."""
        number = min(MOST, len(images))
        sheet = Image.new("RGB", (4 * (CELL + GAP) + GAP, HEAD + number * (CELL + GAP) + GAP), (255, 255, 255))
        for column, title in enumerate(TITLES):
            ImageDraw.Draw(sheet).text((GAP + column * (CELL + GAP), GAP), title, fill=(90, 90, 90))
        for row in range(number):
            parts = self.row(images[row], corruption.part(slice(row, row + 1)), answers[row], targets[row])
            for column, patches in enumerate(parts):
                sheet.paste(self.picture(patches), (GAP + column * (CELL + GAP), HEAD + GAP + row * (CELL + GAP)))
        return sheet

    def row(self, image: Tensor, corruption: Corruption, answers: Tensor, targets: Tensor) -> Iterator[Tensor]:
        """Each as (N, C, height, width) from 0 to 1; what was not asked about is pale in the last two."""
        patches = cut((image.cpu() * self.std + self.mean)[None], self.extra.cell)[0]
        yield patches
        seen = patches[corruption.source[0].cpu()].clone()
        seen[corruption.masked[0].cpu()] = hatching(*self.extra.cell)
        yield seen
        for colours in (self.predicted(answers.cpu()), self.true(targets.cpu())):
            pale = patches * 0.25 + 0.75
            pale[corruption.asked[0].cpu()] = colours
            yield pale

    def predicted(self, answers: Tensor) -> Tensor:
        if self.extra.how.target == "pixels":
            return self.of_pixels(answers)
        return self.of_classes(self.extra.by_colour(answers).argmax(-1))

    def true(self, targets: Tensor) -> Tensor:
        return self.of_pixels(targets) if self.extra.how.target == "pixels" else self.of_classes(targets)

    def of_pixels(self, values: Tensor) -> Tensor:
        return (values.unflatten(1, (-1, *self.extra.cell)) * self.std + self.mean).clamp(0, 1)

    def of_classes(self, classes: Tensor) -> Tensor:
        """(N,) or (N, 16) -> (N, C, height, width)."""
        side = SMALL if classes.ndim > 1 else 1
        colours = colour_of(classes.reshape(len(classes), -1), self.extra.channels)  # (N, 1 or 16, C)
        return F.interpolate(colours.mT.unflatten(2, (side, side)), size=self.extra.cell, mode="nearest")

    def picture(self, patches: Tensor) -> Image.Image:
        x = patches.unflatten(0, self.grid).permute(2, 0, 3, 1, 4).flatten(3).flatten(1, 2)  # (C, H, W)
        x = x if len(x) == 3 else x[:1].expand(3, -1, -1)
        pixels = (x.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous().numpy()
        return Image.fromarray(pixels).resize((CELL, CELL), Image.Resampling.NEAREST)
