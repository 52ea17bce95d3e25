"""Group images that belong together (--group-by), so that no object, patient or burst is in two splits."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from vitral.data.dataset import NO_LABEL, DatasetIndex
from vitral.data.sources.table import column_names, read_column
from vitral.errors import ConfigError, DataError, did_you_mean, short_repr

_PATTERN = re.compile(r"[\\^$*+?{}\[\]|()]")
"""A character that makes a text a pattern; others may be the name of a column."""
_EXAMPLE = r"such as '([^/]+)_\d+\.jpg$'"
_MAX_NAMES = 10


def group_images(data: DatasetIndex, group_by: str | None) -> DatasetIndex:
    """Return the dataset with the groups of its images, by a column of its table or a pattern on its names.

    The first parenthesis of the pattern, or else its whole match, is the name of the group. An image without one is a
    group of its own.
    """
    if group_by is None:
        return data
    names = dict(_name_groups(data, group_by))
    keys = {split: [item.key for item in items] for split, items in data.splits.items()}
    every = [key for members in keys.values() for key in members]
    alone = [key for key in every if key not in names]
    if len(alone) == len(every):
        raise DataError(
            f"--group-by {group_by} matches none of the {len(every):,} images, such as {every[0]}.",
            hint=f"Pass a column of a table, or a pattern on these names {_EXAMPLE}.",
        )
    groups = {key: names.get(key, key) for key in every}
    if len(train := {groups[key] for key in keys.get("train", every)}) == 1:
        raise DataError(
            f"--group-by {group_by} puts all training images into one group ({train.pop()}), so none can be held out.",
            hint=f"Pass a pattern whose first parenthesis differs between groups, {_EXAMPLE}.",
        )
    notes = list(_find_problems(data, groups))
    if alone:
        notes.append(f"{len(alone):,} of {len(every):,} images are in no group of --group-by, such as {alone[0]}.")
    return replace(data, groups=groups, notes=(*data.notes, *notes))


def _name_groups(data: DatasetIndex, group_by: str) -> Iterator[tuple[str, str]]:
    """Yield the names of images that are in a group, each with that of the group."""
    columns = list(dict.fromkeys(name for path, _ in data.tables for name in column_names(path)))
    if group_by in columns:
        for path, key in data.tables:
            for name, cell in read_column(path, group_by, key).items():
                if cell is not None and cell == cell and str(cell).strip():  # NaN differs from itself
                    yield name, str(cell).strip()
        return
    if columns and not _PATTERN.search(group_by):
        hint = did_you_mean(group_by, columns) or "Pass one of them, or a pattern with parentheses."
        listed = ", ".join(columns[:_MAX_NAMES])
        raise DataError(f"{data.name} has no column {short_repr(group_by)} (it has {listed}).", hint=hint)
    try:
        pattern = re.compile(group_by)
    except re.error as error:
        raise ConfigError(
            f"group_by={short_repr(group_by)} is not a regular expression: {error}.", hint=f"Pass one {_EXAMPLE}."
        ) from error
    for items in data.splits.values():
        for item in items:
            if (match := pattern.search(item.key)) and (name := match[1] if pattern.groups else match[0]):
                yield item.key, name


def _find_problems(data: DatasetIndex, groups: Mapping[str, str]) -> Iterator[str]:
    """Yield warnings on groups that are already divided, and on classes of which none can be held out."""
    train = data.splits.get("train", ())
    trained = {groups[item.key] for item in train}
    for split, items in data.splits.items():
        if split != "train" and (leaked := sorted(trained & {groups[item.key] for item in items})):
            names = ", ".join(leaked[:3]) + (" and more" if len(leaked) > 3 else "")
            yield f"{len(leaked):,} groups have images in train and in {split} ({names}); scores will be inflated."
    if len(data.splits) > 1:
        return
    groups_of: dict[int, set[str]] = {}
    for item in train:
        for label in item.labels:
            groups_of.setdefault(label, set()).add(groups[item.key])
    labels = [label for label, members in sorted(groups_of.items()) if len(members) == 1 and label != NO_LABEL]
    if single := [data.classes[label] for label in labels]:
        names = ", ".join(single[:_MAX_NAMES]) + (" and more" if len(single) > _MAX_NAMES else "")
        yield f"Classes with one group, of which no image can be held out: {names}."
