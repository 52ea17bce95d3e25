"""A look at a dataset before training on it: what is in it, what is wrong with it, and whether training can go on."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from vitral.data.dataset import DatasetIndex, Item, counts, header_of, natural_channels
from vitral.data.decode import BadImageError, Header, decode

MOST_LISTED = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    done: int
    total: int


@dataclass(kw_only=True, slots=True)
class Scan:
    """What was found."""

    name: str
    classes: tuple[str, ...]
    multi_label: bool
    splits: dict[str, int]
    per_class: dict[str, list[int]]
    """Pictures of each class, by split."""
    channels: int = 3
    """What a network for them would see: 1 is grey, 3 colours, others bands as they are."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Smallest, median and largest height and width."""
    aspects: dict[str, int] = field(default_factory=dict)
    """How many are tall, square and wide."""
    modes: dict[str, int] = field(default_factory=dict)
    formats: dict[str, int] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    """Name and reason."""
    duplicates: list[list[str]] = field(default_factory=list)
    """Groups of equal pictures within a split."""
    leaked: list[tuple[str, str]] = field(default_factory=list)
    """Equal pictures of which one is trained on and the other held out."""
    contradictions: list[list[str]] = field(default_factory=list)
    """Equal pictures with different labels."""
    problems: list[str] = field(default_factory=list)
    """What stops training."""
    warnings: list[str] = field(default_factory=list)
    """What training can go on with."""

    @property
    def can_train(self) -> bool:
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "can_train": self.can_train}


def scan(data: DatasetIndex, *, most_bad: float = 0.01, decodes: bool = True) -> Iterator[Progress | Scan]:
    """Reads every picture once; progress first, the result last. Without ``decodes`` only headers are read."""
    found = Scan(
        name=data.name,
        classes=data.classes,
        multi_label=data.multi_label,
        splits={split: len(items) for split, items in data.splits.items()},
        per_class={split: counts(items, len(data.classes)) for split, items in data.splits.items()},
        warnings=list(data.notes),
    )
    items = [(split, item) for split, members in data.splits.items() for item in members]
    seen: dict[bytes, list[tuple[str, Item]]] = {}
    headers: list[tuple[Item, Header]] = []
    for number, (split, item) in enumerate(items, 1):
        try:
            content = item.source.read()
            seen.setdefault(_digest(content), []).append((split, item))
            header = header_of(content)
            if decodes and isinstance(content, bytes):
                decode(content, header=header, channels=3 if header.bands == 1 else header.bands)
            headers.append((item, header))
        except BadImageError as error:
            found.unreadable[item.key] = str(error)
        if number % 64 == 0:
            yield Progress(done=number, total=len(items))
    _measure(found, [header for _, header in headers])
    _find_odd_bands(found, headers)
    _compare(found, seen)
    _judge(found, data, len(items), most_bad)
    yield found


def _digest(content: Any) -> bytes:
    return hashlib.sha256(content if isinstance(content, bytes) else content.tobytes()).digest()


def _measure(found: Scan, headers: Sequence[Header]) -> None:
    if not headers:
        return
    found.modes = dict(Counter(header.mode for header in headers).most_common())
    found.formats = dict(Counter(header.format for header in headers).most_common())
    sides = [(header.height, header.width) for header in headers]
    heights, widths = sorted(height for height, _ in sides), sorted(width for _, width in sides)
    for name, values in (("height", heights), ("width", widths)):
        found.sizes |= {f"{name}_smallest": values[0], f"{name}_median": values[len(values) // 2]}
        found.sizes[f"{name}_largest"] = values[-1]
    kinds = Counter("square" if h * 0.95 <= w <= h * 1.05 else "wide" if w > h else "tall" for h, w in sides)
    found.aspects = dict(kinds.most_common())


def _find_odd_bands(found: Scan, headers: Sequence[tuple[Item, Header]]) -> None:
    """Pictures that are whole, but cannot stand beside the others."""
    found.channels = natural_channels([header for _, header in headers])
    for item, header in headers:
        if header.bands == found.channels or {header.bands, found.channels} <= {1, 3}:
            continue
        try:
            content = item.source.read()
            if isinstance(content, bytes):
                decode(content, channels=found.channels, header=header)
        except BadImageError as error:
            found.unreadable[item.key] = str(error)


def _compare(found: Scan, seen: dict[bytes, list[tuple[str, Item]]]) -> None:
    for members in seen.values():
        if len(members) < 2:
            continue
        if len({item.label for _, item in members}) > 1:
            found.contradictions.append([item.key for _, item in members])
        splits: dict[str, list[str]] = {}
        for split, item in members:
            splits.setdefault(split, []).append(item.key)
        found.duplicates += [keys for keys in splits.values() if len(keys) > 1]
        if "train" in splits:
            held = [key for split, keys in splits.items() if split != "train" for key in keys]
            found.leaked += [(splits["train"][0], key) for key in held]


def _judge(found: Scan, data: DatasetIndex, total: int, most_bad: float) -> None:
    train = found.per_class.get("train", [])
    if len(data.classes) < 2:
        found.problems.append(f"There is {len(data.classes)} class; telling apart needs two.")
    if not any(train):
        found.problems.append("There are no training pictures.")
    if total and len(found.unreadable) > most_bad * total:
        found.problems.append(
            f"{len(found.unreadable)} of {total} pictures cannot be read; at most {most_bad:.0%} may."
        )
    elif found.unreadable:
        found.warnings.append(f"{len(found.unreadable)} pictures cannot be read and will be skipped.")
    if empty := [name for name, number in zip(data.classes, train, strict=False) if not number]:
        held = [name for name in empty if any(number[data.classes.index(name)] for number in found.per_class.values())]
        if held:
            found.problems.append(f"Held out, but never trained on: {', '.join(held[:10])}.")
        if left := [name for name in empty if name not in held]:
            found.warnings.append(f"Classes without a picture: {', '.join(left[:10])}.")
    if lonely := [name for name, number in zip(data.classes, train, strict=False) if number == 1]:
        found.warnings.append(f"Classes with one training picture: {', '.join(lonely[:10])}.")
    lower = Counter(name.lower() for name in data.classes)
    if twins := [name for name in data.classes if lower[name.lower()] > 1]:
        found.warnings.append(f"Classes that differ in capitals only: {', '.join(twins[:10])}.")
    if found.leaked:
        found.warnings.append(f"{len(found.leaked)} held-out pictures are trained on, too: scores will flatter.")
    if found.duplicates:
        extra = sum(len(group) - 1 for group in found.duplicates)
        found.warnings.append(f"{extra} pictures are copies of others in the same split.")
    if found.contradictions:
        found.warnings.append(f"{len(found.contradictions)} pictures are there under different labels.")
    present = [number for number in train if number]
    if present and max(present) > 3 * min(present):
        found.warnings.append(
            f"The commonest class has {max(present) / min(present):.0f} times the pictures of the rarest; training "
            "will weigh them."
        )
    if "test" not in found.splits and "val" not in found.splits:
        found.warnings.append("There is no held-out split: about a fifth of each class will be taken.")
