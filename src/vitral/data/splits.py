"""Which pictures are trained on, which choose the best epoch, and which are touched once, at the end."""

from dataclasses import dataclass, replace

from vitral.data.dataset import DatasetIndex, Item
from vitral.data.sources import find_equal, split_off
from vitral.errors import DataError

VAL_FRACTION = 0.1
A_FIFTH = "about a fifth of each class, by a hash of the names"


@dataclass(frozen=True, kw_only=True)
class Splits:
    train: tuple[Item, ...]
    validation: tuple[Item, ...]
    test: tuple[Item, ...]
    reasons: dict[str, str]
    """Why these pictures are the validation, and why those are held out."""


def choose_splits(data: DatasetIndex, other: DatasetIndex | None = None, selected: float = VAL_FRACTION) -> Splits:
    """What is trained on, what chooses the best epoch (a part of the training pictures, unless the data bring a
    validation split), and what is touched once, at the end."""
    train = data.splits.get("train", ())
    leaders = None
    reasons = {}
    if other is not None:
        held, reasons["test"] = renumbered(other, data.classes), "as --val says"
    elif own := own_held_out(data):
        held, reasons["test"] = data.splits[own], f"the data's own {own} split"
    else:
        leaders = find_equal(train)
        rest, part = split_off(train, leaders=leaders)
        train, held = tuple(rest), tuple(part)
        reasons["test"] = A_FIFTH if data.classes else "about a fifth, by a hash of the names"
    if "val" in data.splits and ("test" in data.splits or other is not None):
        validation, reasons["validation"] = data.splits["val"], "the data's own val split"
    else:
        rest, part = split_off(train, selected, salt="selection", leaders=leaders)
        if part and len(rest) > len(part):
            train, validation = tuple(rest), tuple(part)
            reasons["validation"] = f"about {100 * selected:.6g} % of the training ones"
        else:
            validation, reasons["validation"] = train, "the training ones: there are too few to take some away"
    if not train:
        raise DataError("There are no training pictures.", hint="A folder of splits needs one that is called train.")
    if not held:
        held, reasons["test"] = validation, "the validation: there are too few to hold others out"
        if validation is train:
            reasons["test"] = "the training pictures themselves, which says little: there are too few"
    return Splits(train=train, validation=validation, test=held, reasons=reasons)


def own_held_out(data: DatasetIndex) -> str | None:
    return next((name for name in ("test", "val") if name in data.splits), None)


def renumbered(other: DatasetIndex, classes: tuple[str, ...]) -> tuple[Item, ...]:
    """The held-out pictures of other data (all, where none are), with the numbers of these classes."""
    if unknown := sorted(set(other.classes) - set(classes)):
        raise DataError(f"{other.name} has classes that the training data lack: {', '.join(unknown[:5])}.")
    numbers = {name: index for index, name in enumerate(classes)}
    found = other.splits.get(own_held_out(other) or "train", ())
    if not classes:  # pictures without labels
        return found
    return tuple(replace(item, label=_renumber(item.label, other.classes, numbers)) for item in found)


def _renumber(label: int | tuple[int, ...], names: tuple[str, ...], numbers: dict[str, int]) -> int | tuple[int, ...]:
    if isinstance(label, int):
        return numbers[names[label]]
    return tuple(numbers[names[part]] for part in label)
