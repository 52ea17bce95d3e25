"""Find image files by what a person types: paths, folders, patterns, or a list on standard input."""

import os
from collections.abc import Iterable, Sequence
from glob import glob, has_magic
from pathlib import Path

from vitral.data.sources.folder import images_below
from vitral.errors import DataError

STANDARD_INPUT = ("-", "/dev/stdin")


def find_images(arguments: Sequence[str], standard_input: Iterable[str]) -> list[str]:
    """Return the image files that the arguments name, in order; folders and patterns are sorted by name.

    Files that do not exist and folders that cannot be listed stay in the list, so that each gets an error row.
    """
    if not arguments:
        raise DataError("No images given.", hint="Pass files, folders, patterns, or - for paths on standard input.")
    paths: list[str] = []
    for argument in arguments:
        if argument in STANDARD_INPUT:
            paths += [line.rstrip("\r\n") for line in standard_input if line.strip()]
        elif os.path.isdir(argument):
            inside = _images_in(argument)
            if not inside:
                raise DataError(f"There are no images in {argument}.")
            paths += inside
        elif has_magic(argument) and not os.path.lexists(argument):
            paths += _expand_pattern(argument)
        else:
            paths.append(argument)
    if not paths:
        raise DataError("Standard input names no images.")
    return paths


def _images_in(folder: str) -> list[str]:
    """Return the images below a folder, and the folders below it that cannot be listed."""
    unlisted: list[OSError] = []
    images = [str(path) for path in images_below(Path(folder), on_error=unlisted.append)]
    return images + [os.fsdecode(error.filename) for error in unlisted]


def _expand_pattern(pattern: str) -> list[str]:
    """Return matching files and the images in matching folders, each once: ** matches both a folder and its files."""
    files, inside = {}, {}
    matches = glob(pattern, recursive=True)
    for path in matches:
        if os.path.isdir(path):
            inside |= {os.path.normpath(image): image for image in _images_in(path)}
        else:
            files[os.path.normpath(path)] = path
    if not files and not inside:
        names = ", ".join(matches[:5])
        raise DataError(f"There are no images in {names}." if matches else f"Nothing matches {pattern}.")
    return sorted((inside | files).values())
