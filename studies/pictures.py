"""CIFAR-10 as a cell wants it: a part of the training pictures, or every picture on a larger canvas; written once, as
tar shards beside the runs."""

import io
import os
import random
import shutil
import tarfile
from collections.abc import Iterable
from pathlib import Path

from PIL import Image

from vitral.data.dataset import Item
from vitral.data.sources import open_dataset

GREY = (127, 127, 127)


def pictures_for(data: str, place: Path, images: int | None, canvas: int | None) -> str:
    """Where they are; the data themselves, where nothing is asked for."""
    if images is None and canvas is None:
        return data
    found = open_dataset(data)
    asked = [f"{what}{value}" for what, value in (("images", images), ("canvas", canvas)) if value is not None]
    name = "-".join((*asked, found.fingerprint()[:8]))
    folder = place / "data" / name
    if folder.is_dir():
        return str(folder)
    aside = folder.with_name(f"{name}.part-{os.getpid()}")
    aside.mkdir(parents=True)
    (aside / "classes.txt").write_text("\n".join(found.classes) + "\n", encoding="utf-8")
    train = found.splits["train"]
    chosen = train if images is None else equally_many(train, images // len(found.classes))
    for split, items in (("train", chosen), ("test", found.splits["test"])):
        _write(aside / f"{split}-000.tar", items, canvas)
    try:
        aside.rename(folder)
    except OSError:  # the other job was quicker, and wrote the same
        if not folder.is_dir():
            raise
        shutil.rmtree(aside)
    return str(folder)


def equally_many(items: Iterable[Item], each: int) -> list[Item]:
    """The first of every class, in an order of their own that is always the same."""
    ordered = sorted(items, key=lambda item: item.key)
    random.Random(0).shuffle(ordered)
    taken: dict[int, list[Item]] = {}
    for item in ordered:
        assert isinstance(item.label, int)
        of_class = taken.setdefault(item.label, [])
        if len(of_class) < each:
            of_class.append(item)
    return [item for label in sorted(taken) for item in taken[label]]


def _write(path: Path, items: Iterable[Item], canvas: int | None) -> None:
    with tarfile.open(path, "w") as tar:
        for number, item in enumerate(items):
            read = item.source.read()
            assert isinstance(read, bytes)
            picture = Image.open(io.BytesIO(read)).convert("RGB")
            if canvas is not None:
                picture = on_canvas(picture, canvas, random.Random(item.key))
            content = io.BytesIO()
            picture.save(content, "PNG")
            for suffix, told in (("png", content.getvalue()), ("cls", str(item.label).encode())):
                info = tarfile.TarInfo(f"{number:06d}.{suffix}")
                info.size = len(told)
                tar.addfile(info, io.BytesIO(told))


def on_canvas(picture: Image.Image, side: int, chance: random.Random) -> Image.Image:
    """The picture at its own scale, anywhere on a grey square."""
    whole = Image.new("RGB", (side, side), GREY)
    whole.paste(picture, (chance.randint(0, side - picture.width), chance.randint(0, side - picture.height)))
    return whole
