"""Open folders of images: class folders, with or without split folders above them."""

import os
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from vitral.data.dataset import NO_LABEL, SPLIT_NAMES, DatasetIndex, FileSource, Item, natural_order
from vitral.data.headers import SUFFIXES
from vitral.errors import DataError
from vitral.files import as_text


@dataclass
class Ignored:
    """Collect what is found between the images and not used."""

    suffixes: Counter[str] = field(default_factory=Counter)
    links: list[Path] = field(default_factory=list)
    """Folders that are links to other classes."""

    def summary(self) -> str:
        """Return the commonest suffixes: "3 files (.txt), 1 file (.pdf)"."""
        return ", ".join(
            f"{count} {'file' if count == 1 else 'files'} ({suffix})" for suffix, count in self.suffixes.most_common(5)
        )

    def notes(self) -> list[str]:
        """Return a note on files that are not images, if there are any."""
        return [f"Skipped files that are not images: {self.summary()}."] if self.suffixes else []


def open_folder(folder: Path) -> DatasetIndex:
    """Return the index of a folder of class folders, or of split folders with class folders in them."""
    homes = find_split_folders(folder) or {folder: "train"}
    entries = [
        (split, unicodedata.normalize("NFC", as_text(entry.name)), entry)
        for home, split in homes.items()
        for entry in subfolders(home)
    ]
    ownership = ClassFolders((name, entry) for _, name, entry in entries)
    ignored = Ignored()
    paths: dict[str, dict[str, list[Path]]] = {}
    for split, name, entry in entries:
        images = list(images_below(entry, ignored, lambda real, name=name: ownership.is_foreign(real, name)))
        if entry not in ignored.links:
            paths.setdefault(split, {}).setdefault(name, []).extend(images)
    used = {name for per_class in paths.values() for name, images in per_class.items() if images}
    classes = tuple(sorted(used, key=natural_order))
    if not classes:
        if loose := [entry for entry in list_folder(folder) if entry.name.lower().endswith(SUFFIXES)]:
            raise DataError(
                f"{folder} has {len(loose)} images, but no class folders.",
                hint="Put the images of each class into a folder of its name, or write a table with the columns "
                "image,label. To train without labels, pass --objective masked-patches.",
            )
        _refuse(folder, ignored, "no images in class folders")
    index_of = {name: index for index, name in enumerate(classes)}
    splits = {
        split: tuple(
            Item(_key(path, folder), index_of[name], FileSource(str(path)))
            for name in sorted(used & per_class.keys(), key=natural_order)
            for path in per_class[name]
        )
        for split, per_class in paths.items()
    }
    empty = {name for per_class in paths.values() for name in per_class} - used
    notes = [f"Skipped a class folder without images: {name}." for name in sorted(empty, key=natural_order)]
    notes += [f"Skipped a link to other classes: {_key(link, folder)}." for link in ignored.links]
    skipped = _broken_links(homes, folder)
    notes += [f"Skipped a link that leads nowhere: {key}." for key in skipped]
    notes += [*_loose_images(homes, folder), *ignored.notes()]
    if untrained := [name for name in classes if "train" in paths and not paths["train"].get(name)]:
        notes.append(f"Classes without training images: {', '.join(untrained[:10])}.")
    name = as_text(folder.resolve().name)
    return DatasetIndex(name=name, classes=classes, splits=splits, notes=tuple(notes), skipped=skipped)


def open_unlabeled_folder(folder: Path) -> DatasetIndex:
    """Return the index of all images below a folder. Only split folders matter; other folder names are ignored."""
    homes = find_split_folders(folder)
    if "train" not in homes.values():
        homes = {folder: "train"}
    ignored = Ignored()
    splits: dict[str, list[Item]] = {}
    for home, split in homes.items():
        items = (Item(_key(path, folder), NO_LABEL, FileSource(str(path))) for path in images_below(home, ignored))
        splits.setdefault(split, []).extend(items)
    if not any(splits.values()):
        _refuse(folder, ignored, "no images")
    frozen = {split: tuple(items) for split, items in splits.items()}
    return DatasetIndex(name=as_text(folder.resolve().name), classes=(), splits=frozen, notes=tuple(ignored.notes()))


def find_split_folders(folder: Path) -> dict[Path, str]:
    """Return the folders that are splits.

    A class may happen to be called "train" or "test": a folder of that name among others, with no folders in it.
    """
    folders = subfolders(folder)
    splits = {entry: SPLIT_NAMES[entry.name.lower()] for entry in folders if entry.name.lower() in SPLIT_NAMES}
    if len(folders) == len(splits):
        return splits
    contain_folders = any(map(subfolders, splits))
    are_several = len(set(splits.values())) > 1
    return splits if "train" in splits.values() and (contain_folders or are_several) else {}


def subfolders(folder: Path) -> list[Path]:
    """Return the folders in a folder that are not hidden, sorted, or raise DataError if that cannot be determined."""
    try:
        return [entry for entry in list_folder(folder) if not entry.name.startswith(".") and entry.is_dir()]
    except OSError as error:  # no permission to look
        _refuse_unlisted(error)


def list_folder(folder: Path) -> list[Path]:
    """Return the entries of a folder, sorted, or raise DataError if it cannot be listed."""
    try:
        with os.scandir(folder) as entries:
            return sorted(Path(entry.path) for entry in entries)
    except OSError as error:
        _refuse_unlisted(error)


def _refuse_unlisted(error: OSError) -> NoReturn:
    """Raise DataError: a class that is dropped because its folder cannot be listed would go unnoticed."""
    raise DataError(
        f"Cannot list the folder {as_text(os.fsdecode(error.filename))}: {error.strerror}.",
        hint="Allow reading it, or move it out of the dataset.",
    ) from error


def images_below(
    folder: Path,
    ignored: Ignored | None = None,
    is_foreign: Callable[[str], bool] = lambda real: False,
    *,
    on_error: Callable[[OSError], None] = _refuse_unlisted,
) -> Iterator[Path]:
    """Yield every image in a folder and the folders below it.

    Hidden files are skipped; links are followed, but not in circles. `on_error` is called for each folder that cannot
    be listed; by default it raises DataError.
    """
    ignored = Ignored() if ignored is None else ignored
    seen: set[str] = set()
    for current, folders, names in os.walk(folder, followlinks=True, onerror=on_error):
        real = os.path.realpath(current)
        is_elsewhere = os.path.islink(current) and is_foreign(real)
        if is_elsewhere:
            ignored.links.append(Path(current))
        if is_elsewhere or real in seen:
            folders[:] = []
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(name for name in names if not name.startswith(".")):
            if _is_image(name):
                yield Path(current, name)
            else:
                ignored.suffixes[as_text(Path(name).suffix.lower()) or "no suffix"] += 1


class ClassFolders:
    """Know which class each folder belongs to, so that no link brings the images of one class into another."""

    def __init__(self, entries: Iterable[tuple[str, Path]]):
        self.names = {os.path.realpath(entry): name for name, entry in entries if not entry.is_symlink()}
        self.parents = {str(parent) for home in self.names for parent in Path(home).parents}

    def is_foreign(self, real: str, name: str) -> bool:
        """Return whether a folder that a link in class `name` leads to contains other classes, or belongs to one."""
        around = (real, *map(str, Path(real).parents))
        return real in self.parents or any(self.names.get(path, name) != name for path in around)


def _broken_links(homes: Iterable[Path], folder: Path) -> dict[str, str]:
    """Return links beside the class folders that lead nowhere or to themselves."""
    entries = (entry for home in homes for entry in list_folder(home))
    broken = (entry for entry in entries if entry.is_symlink() and not os.path.exists(entry))
    return {_key(entry, folder): "broken or circular link" for entry in broken if not entry.name.startswith(".")}


def _loose_images(homes: Iterable[Path], folder: Path) -> list[str]:
    notes = []
    for home in homes:
        if loose := sum(_is_image(entry.name) and os.path.isfile(entry) for entry in list_folder(home)):
            where = "beside the class folders" if home == folder else f"of {_key(home, folder)} in no class folder"
            notes.append(f"Skipped {loose:,} {'image' if loose == 1 else 'images'} {where}.")
    return notes


def _is_image(name: str) -> bool:
    return name.lower().endswith(SUFFIXES) and not name.startswith(".")


def _key(path: Path, folder: Path) -> str:
    return as_text(path.relative_to(folder).as_posix())


def _refuse(folder: Path, ignored: Ignored, problem: str) -> NoReturn:
    others = f", but {ignored.summary()}" if ignored.suffixes else ""
    raise DataError(f"{folder} has {problem}{others}.", hint=f"Image files end in {', '.join(SUFFIXES)}.")
