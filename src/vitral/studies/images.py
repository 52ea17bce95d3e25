"""Write the datasets of cells with ``images`` or ``canvas``: tar shards beside the runs, written once."""

import io
import random
import tarfile
from collections.abc import Iterable
from itertools import groupby, islice
from operator import attrgetter
from pathlib import Path

from PIL import Image

from vitral.data.dataset import DatasetIndex, Item
from vitral.data.sources import open_dataset
from vitral.data.splits import own_test_split
from vitral.errors import DataError
from vitral.files import atomic_folder

GRAY = 127


def open_with_test_split(data: str | Path) -> DatasetIndex:
    """Open a dataset that has what a study needs: one label per image, and a test split."""
    index = open_dataset(data)
    if index.multi_label:
        raise DataError(f"{index.name} has several labels per image; studies need one.")
    if own_test_split(index) is None:
        problem = f"{index.name} has no test split, which all cells of a study share."
        raise DataError(problem, hint="Add a folder or shards: test.")
    return index


def dataset_for(data: str, out: Path, *, images: int | None = None, canvas: int | None = None) -> str:
    """Return the dataset of a cell: the data itself, or shards with fewer images or a larger canvas."""
    if images is None and canvas is None:
        return data
    index = open_with_test_split(data)
    changes = [f"{key}{value}" for key, value in (("images", images), ("canvas", canvas)) if value is not None]
    folder = out / "data" / "-".join((*changes, index.fingerprint()[:8]))
    if not folder.is_dir():
        _write_shards(folder, index, images, canvas)
    return str(folder)


def _write_shards(folder: Path, index: DatasetIndex, images: int | None, canvas: int | None) -> None:
    splits = dict(index.splits)
    if images is not None:
        if images < len(index.classes):
            raise DataError(f"images={images} is less than one image for each of the {len(index.classes)} classes.")
        splits["train"] = tuple(balanced_subset(splits["train"], images // len(index.classes)))
    with atomic_folder(folder) as temporary:
        (temporary / "classes.txt").write_text("\n".join(index.classes) + "\n", encoding="utf-8")
        for split, items in splits.items():
            _write_shard(temporary / f"{split}-000.tar", items, canvas)


def balanced_subset(items: Iterable[Item], per_class: int) -> list[Item]:
    """Return the first images of every class, in a fixed random order."""
    ordered = sorted(items, key=attrgetter("key"))
    random.Random(0).shuffle(ordered)
    by_class = groupby(sorted(ordered, key=attrgetter("label")), key=attrgetter("label"))
    return [item for _, same_class in by_class for item in islice(same_class, per_class)]


def _write_shard(path: Path, items: Iterable[Item], canvas: int | None) -> None:
    with tarfile.open(path, "w") as tar:
        for number, item in enumerate(items):
            raw, content = item.source.read(), io.BytesIO()
            image = Image.open(io.BytesIO(raw)) if isinstance(raw, bytes) else Image.fromarray(raw.squeeze())
            image = image.convert("L" if image.mode in ("1", "L") else "RGB")
            if canvas is not None:
                image = on_canvas(image, canvas, random.Random(item.key))
            image.save(content, "PNG")
            for suffix, member in (("png", content.getvalue()), ("cls", str(item.label).encode())):
                info = tarfile.TarInfo(f"{number:06d}.{suffix}")
                info.size = len(member)
                tar.addfile(info, io.BytesIO(member))


def on_canvas(image: Image.Image, side: int, generator: random.Random) -> Image.Image:
    """Return the image, unscaled, at a random position on a gray square."""
    if max(image.size) > side:
        raise DataError(f"canvas={side} is smaller than an image of {image.width} x {image.height} pixels.")
    canvas = Image.new(image.mode, (side, side), GRAY if image.mode == "L" else (GRAY,) * 3)
    canvas.paste(image, (generator.randint(0, side - image.width), generator.randint(0, side - image.height)))
    return canvas
