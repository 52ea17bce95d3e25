"""Which pictures are trained on, which choose the best epoch, and which are touched once, at the end."""

from dataclasses import dataclass, replace

from vitral.data.items import Dataset, Item
from vitral.data.sources import split_off
from vitral.errors import DataError
from vitral.train.events import Decided

SELECTION = 0.1
"""The part of the training pictures that chooses the best epoch, where the data bring no validation split."""


@dataclass(frozen=True, kw_only=True)
class Splits:
    train: tuple[Item, ...]
    selection: tuple[Item, ...]
    held_out: tuple[Item, ...]


def settle_splits(data: Dataset, other: Dataset | None) -> tuple[Splits, list[Decided]]:
    """What is trained on, what chooses the best epoch, and what is touched once, at the end."""
    made = []
    train = data.splits.get("train", ())
    if other is not None:
        if other.classes != data.classes:
            unknown = sorted(set(other.classes) - set(data.classes))
            if unknown:
                raise DataError(f"--val has classes that the training data lack: {', '.join(unknown[:5])}.")
        numbers = {name: index for index, name in enumerate(data.classes)}
        found = other.splits.get("test") or other.splits.get("val") or other.splits.get("train", ())
        held = tuple(replace(item, label=_renumber(item.label, other.classes, numbers)) for item in found)
        made.append(Decided(name="held out", value=f"{len(held):,} pictures", reason="as --val says"))
    elif "test" in data.splits or "val" in data.splits:
        name = "test" if "test" in data.splits else "val"
        held = data.splits[name]
        made.append(Decided(name="held out", value=f"{len(held):,} pictures", reason=f"the data's own {name} split"))
    else:
        rest, part = split_off(train)
        train, held = tuple(rest), tuple(part)
        made.append(Decided(name="held out", value=f"{len(held):,} pictures", reason="a fifth of each class, by name"))
    if "val" in data.splits and ("test" in data.splits or other is not None):
        selection = data.splits["val"]
        made.append(Decided(name="selection", value=f"{len(selection):,} pictures", reason="the data's own val split"))
    else:
        rest, part = split_off(train, SELECTION, salt="selection")
        if part and len(rest) > len(part):
            train, selection = tuple(rest), tuple(part)
            made.append(
                Decided(name="selection", value=f"{len(part):,} pictures", reason="a tenth of the training ones")
            )
        else:
            selection = train
    if not train:
        raise DataError("There are no training pictures.")
    if not held:
        held = selection
    return Splits(train=train, selection=selection, held_out=held), made


def _renumber(label: int | tuple[int, ...], names: tuple[str, ...], numbers: dict[str, int]) -> int | tuple[int, ...]:
    if isinstance(label, int):
        return numbers[names[label]]
    return tuple(numbers[names[part]] for part in label)
