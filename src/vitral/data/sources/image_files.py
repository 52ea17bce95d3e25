"""From what a person types to picture files: paths, folders, patterns, or a list on standard input."""

import os
from collections.abc import Iterable, Sequence
from glob import glob, has_magic
from pathlib import Path

from vitral.data.sources.folder import images_below
from vitral.errors import DataError

STANDARD_INPUT = ("-", "/dev/stdin")


def find_images(words: Sequence[str], standard_input: Iterable[str]) -> list[str]:
    """In the order given, folders and patterns by name. A file that is not there stays in the list: it gets a row."""
    if not words:
        raise DataError("There are no pictures.", hint="Name files, folders, patterns, or - for a list.")
    found: list[str] = []
    for word in words:
        if word in STANDARD_INPUT:
            found += [line.rstrip("\r\n") for line in standard_input if line.strip()]
        elif os.path.isdir(word):
            inside = [str(path) for path in images_below(Path(word))]
            if not inside:
                raise DataError(f"There are no pictures in {word}.")
            found += inside
        elif has_magic(word) and not os.path.lexists(word):
            found += _matching(word)
        else:
            found.append(word)
    if not found:
        raise DataError("Standard input names no pictures.")
    return found


def _matching(pattern: str) -> list[str]:
    """Files, and the pictures in folders; ** matches both a folder and what is in it, which is taken once."""
    files, inside = {}, {}
    found = glob(pattern, recursive=True)
    for path in found:
        if os.path.isdir(path):
            inside |= {os.path.normpath(below): str(below) for below in images_below(Path(path))}
        else:
            files[os.path.normpath(path)] = path
    if not files and not inside:
        raise DataError(f"There are no pictures in {', '.join(found[:5])}." if found else f"Nothing matches {pattern}.")
    return sorted((inside | files).values())
