"""Class folders, below split folders or not, and the pictures in them."""

import os
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from vitral.data.dataset import NO_LABEL, SPLITS, DatasetIndex, FileSource, Item, natural_order
from vitral.data.decode import SUFFIXES
from vitral.errors import DataError
from vitral.files import as_text


def open_folder(folder: Path) -> DatasetIndex:
    homes = split_folders(folder) or {folder: "train"}
    entries = [(split, name, entry) for home, split in homes.items() for name, entry in class_folders(home)]
    classes_of = ClassOf((name, entry) for _, name, entry in entries)
    aside = Aside()
    found: dict[str, dict[str, list[Path]]] = {}
    for split, name, entry in entries:
        pictures = list(images_below(entry, aside, lambda real, name=name: classes_of.is_foreign(real, name)))
        if entry not in aside.links:
            found.setdefault(split, {}).setdefault(name, []).extend(pictures)
    named = {name for per_class in found.values() for name in per_class}
    filled = {name for per_class in found.values() for name, pictures in per_class.items() if pictures}
    classes = tuple(sorted(filled, key=natural_order))
    if not classes:
        _refuse_folder(folder, aside)
    numbers = {name: index for index, name in enumerate(classes)}
    items = {
        split: tuple(
            Item(_key(path, folder), numbers[name], FileSource(str(path)))
            for name in sorted(filled & per_class.keys(), key=natural_order)
            for path in per_class[name]
        )
        for split, per_class in found.items()
    }
    notes = [f"Left out, as there is no picture in it: {name}." for name in sorted(named - filled, key=natural_order)]
    notes += [f"Left out, as it is a link to other classes: {_key(link, folder)}." for link in aside.links]
    for home in homes:
        if loose := sum(_is_picture(entry.name) for entry in os.scandir(home) if entry.is_file()):
            where = "beside the class folders" if home == folder else f"of {_key(home, folder)} in no class folder"
            notes.append(f"Left out: {loose:,} {'picture' if loose == 1 else 'pictures'} {where}.")
    if aside.endings:
        notes.append(f"Not taken, as these are no pictures that can be read: {aside.counted()}.")
    if empty := [name for name in classes if "train" in found and not found["train"].get(name)]:
        notes.append(f"No training picture: {', '.join(empty[:10])}.")
    return DatasetIndex(name=as_text(folder.resolve().name), classes=classes, splits=items, notes=tuple(notes))


def open_pictures(folder: Path) -> DatasetIndex:
    """All pictures below a folder, whatever the folders in between say; only splits are minded."""
    homes = split_folders(folder)
    if "train" not in homes.values():
        homes = {folder: "train"}
    aside = Aside()
    found: dict[str, list[Item]] = {}
    for home, split in homes.items():
        items = (Item(_key(path, folder), NO_LABEL, FileSource(str(path))) for path in images_below(home, aside))
        found.setdefault(split, []).extend(items)
    if not any(found.values()):
        seen = f", but {aside.counted()}" if aside.endings else ""
        raise DataError(f"{folder} holds no pictures{seen}.", hint=f"Pictures end in {', '.join(SUFFIXES)}.")
    notes = (f"Not taken, as these are no pictures that can be read: {aside.counted()}.",) if aside.endings else ()
    splits = {split: tuple(items) for split, items in found.items()}
    return DatasetIndex(name=as_text(folder.resolve().name), classes=(), splits=splits, notes=notes)


def split_folders(folder: Path) -> dict[Path, str]:
    """Those that are called as a split is, unless it is a class that happens to be called "train" or "test": one among
    others, and no folders in it."""
    below = [entry for entry in sorted(folder.iterdir()) if _is_folder(entry)]
    splits = {entry: SPLITS[entry.name.lower()] for entry in below if entry.name.lower() in SPLITS}
    if len(below) == len(splits):
        return splits
    hold_folders = any(_is_folder(inner) for home in splits for inner in home.iterdir())
    are_several = len(set(splits.values())) > 1
    return splits if "train" in splits.values() and (hold_folders or are_several) else {}


def _is_picture(name: str) -> bool:
    return name.lower().endswith(SUFFIXES) and not name.startswith(".")


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.name.startswith(".")


def _key(path: Path, folder: Path) -> str:
    return as_text(path.relative_to(folder).as_posix())


def class_folders(folder: Path) -> Iterator[tuple[str, Path]]:
    """The name of each class, and its folder; folders in a class folder belong to it."""
    for entry in sorted(folder.iterdir()):
        if _is_folder(entry):
            yield unicodedata.normalize("NFC", as_text(entry.name)), entry


class ClassOf:
    """Which class a folder belongs to, so that no link brings the pictures of one class into another."""

    def __init__(self, entries: Iterable[tuple[str, Path]]):
        self.names = {os.path.realpath(entry): name for name, entry in entries if not entry.is_symlink()}
        self.above = {str(parent) for home in self.names for parent in Path(home).parents}

    def is_foreign(self, real: str, name: str) -> bool:
        """Whether a folder that a link in this class leads to holds other classes, or is of one."""
        around = (real, *map(str, Path(real).parents))
        return real in self.above or any(self.names.get(place, name) != name for place in around)


@dataclass
class Aside:
    """What was seen among the pictures and not taken."""

    endings: Counter[str] = field(default_factory=Counter)
    links: list[Path] = field(default_factory=list)
    """Folders that are links to other classes."""

    def counted(self) -> str:
        return ", ".join(
            f"{number} {'file' if number == 1 else 'files'} ({ending})"
            for ending, number in self.endings.most_common(5)
        )


def images_below(
    folder: Path, aside: Aside | None = None, is_foreign: Callable[[str], bool] = lambda real: False
) -> Iterator[Path]:
    """Every picture in a folder and those below, hidden ones left out, links followed but not in circles."""
    aside = Aside() if aside is None else aside
    seen: set[str] = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        is_elsewhere = os.path.islink(place) and is_foreign(real)
        if is_elsewhere:
            aside.links.append(Path(place))
        if is_elsewhere or real in seen:
            folders[:] = []
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if name.startswith("."):
                continue
            if _is_picture(name):
                yield Path(place, name)
            else:
                aside.endings[as_text(Path(name).suffix.lower()) or "no ending"] += 1


def _refuse_folder(folder: Path, aside: Aside) -> None:
    loose = [entry for entry in folder.iterdir() if entry.name.lower().endswith(SUFFIXES)]
    if loose:
        raise DataError(
            f"{folder} holds {len(loose)} pictures, but no folders that say what they show.",
            hint="Put the pictures of each class into a folder with its name, or write a table: image,label. Without "
            "labels, `vitral train DATA --objective masked-patches` learns from them.",
        )
    seen = f", but {aside.counted()}" if aside.endings else ""
    raise DataError(
        f"{folder} holds no pictures in class folders{seen}.", hint=f"Pictures end in {', '.join(SUFFIXES)}."
    )
