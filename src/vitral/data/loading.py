"""Datasets and batches for training loops of your own: `vitral.data.Dataset` and `vitral.data.loader`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from vitral.data.augment import Augment
from vitral.data.batches import BatchLoader, ImageDataset, label_tensor
from vitral.data.dataset import DatasetIndex, Item, natural_channels, sample_headers
from vitral.data.decode import decode
from vitral.data.headers import BadImageError
from vitral.data.sources import open_dataset
from vitral.data.splits import choose_splits, own_test_split, split_off
from vitral.data.transforms import as_tensor, normalize
from vitral.errors import ConfigError, DataError, check_number, check_type, short_repr
from vitral.preprocess import Preprocess

Split = Literal["train", "validation", "test", "all"]
_SAMPLED_HEADERS = 50


class Dataset(TorchDataset[tuple[Any, "int | Tensor"]]):
    """A map-style dataset for `torch.utils.data.DataLoader`.

    `data` is anything that `vitral.train` accepts: class folders, a table, tar shards, hf:owner/name or builtin:digits.
    `split` is train, validation, test or all. From a dataset without splits, about a fifth of each class becomes the
    test split, by a hash of the names, as in `vitral.train`. `val_fraction=0.1` also takes the validation split of
    `vitral.train` from the training images.

    Each element is `(image, label)`. The image is a uint8 tensor (C, H, W), upright and at its original size, or the
    result of `transform`, which is called with that tensor. The label is a class index, or a tensor (K,) of 0 and 1 for
    multi-label data. An image that cannot be read raises BadImageError; `vitral.data.loader` skips such images instead.

        digits = vitral.data.Dataset("builtin:digits", transform=lambda image: image / 255)
        for images, labels in torch.utils.data.DataLoader(digits, batch_size=64, shuffle=True):
            ...
    """

    def __init__(
        self,
        data: str | Path,
        split: Split = "train",
        transform: Callable[[Tensor], Any] | None = None,
        *,
        channels: int | None = None,
        val_fraction: float = 0.0,
    ):
        index = open_dataset(data)
        self.items: tuple[Item, ...] = split_items(index, split, val_fraction)
        self.classes, self.multi_label = index.classes, index.multi_label
        self.transform = transform
        self.channels = channels or natural_channels(sample_headers(self.items, _SAMPLED_HEADERS))

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Any, "int | Tensor"]:
        item = self.items[index]
        try:
            image = as_tensor(decode(item.source.read(), self.channels)).contiguous()
        except BadImageError as error:
            raise BadImageError(error.reason, f"{item.key} ({error})") from error
        label = label_tensor([item], len(self.classes), self.multi_label)[0]
        return self.transform(image) if self.transform else image, label if self.multi_label else int(label)


@dataclass(kw_only=True)
class Loader:
    """Yield `(images, labels)` batches. Each iteration over a loader is the next epoch."""

    batches: BatchLoader
    classes: tuple[str, ...]
    multi_label: bool
    skipped: dict[str, str] = field(default_factory=dict)
    """Images that could not be read so far, with the reasons."""
    epoch: int = 0
    """The epoch that the next iteration yields."""

    def __len__(self) -> int:
        return self.batches.batches_per_epoch

    def __iter__(self) -> Iterator[tuple[Tensor | list[Tensor], Tensor]]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        items, preprocess = self.batches.images.items, self.batches.images.preprocess
        for batch in self.batches.epoch(epoch):
            self.skipped |= {items[index].key: reason for index, reason in batch.bad}
            if isinstance(batch.images, Tensor):
                yield normalize(batch.images, preprocess), batch.labels
            elif batch.images:
                yield [normalize(image, preprocess) for image in batch.images], batch.labels


def loader(
    data: str | Path,
    split: Split = "train",
    *,
    preprocess: Preprocess,
    batch_size: int = 32,
    augment: Augment | None = None,
    shuffle: bool | None = None,
    seed: int = 0,
    workers: int = 0,
    patch: tuple[int, int] = (1, 1),
    val_fraction: float = 0.0,
) -> Loader:
    """Return a loader of normalized batches for a training loop of your own.

    It yields the same batches, bit for bit, for any number of `workers`, and those of `vitral.train` if the settings
    are equal (which include `val_fraction=0.1` there). `data` and `split` are as for `vitral.data.Dataset`.
    `preprocess` is that of a checkpoint, or `vitral.Preprocess(size=(224, 224))`. `shuffle` defaults to True for the
    train split; a shuffled epoch drops its last, smaller batch. Images that cannot be read are skipped and listed in
    `skipped`. With `resize="native"`, `images` is a list of tensors whose sides are multiples of `patch`.

        checkpoint = vitral.load("dinov2-s14", num_classes=10)
        batches = vitral.data.loader("photos/", preprocess=checkpoint.preprocess, augment=vitral.data.Augment(flip=0.5))
        for epoch in range(10):
            for images, labels in batches:      # (B, C, H, W) floats and (B,) class indices
                loss = cross_entropy(checkpoint.model(images), labels)
    """
    check_type("preprocess", preprocess, Preprocess, hint="Pass vitral.Preprocess(size=(224, 224)), for example.")
    check_type("augment", augment, Augment, type(None), hint="Pass vitral.data.Augment(flip=0.5), for example.")
    index = open_dataset(data)
    items = split_items(index, split, val_fraction)
    batches = BatchLoader(
        images=ImageDataset(items, preprocess, augment=augment, seed=seed, patch=patch),
        batch_size=batch_size,
        classes=len(index.classes),
        multi_label=index.multi_label,
        shuffle=split == "train" if shuffle is None else shuffle,
        workers=workers,
    )
    return Loader(batches=batches, classes=index.classes, multi_label=index.multi_label)


def split_items(index: DatasetIndex, split: str, val_fraction: float = 0.0) -> tuple[Item, ...]:
    """Return the items of a split: the dataset's own, or one by a hash of the names."""
    if split == "all":
        return tuple(item for items in index.splits.values() for item in items)
    if split not in ("train", "validation", "test"):
        raise ConfigError(f"split must be train, validation, test or all (got {short_repr(split)}).")
    if check_number("val_fraction", val_fraction, minimum=0, below=1):
        return getattr(choose_splits(index, val_fraction=val_fraction), split)
    splits = {"validation" if name == "val" else name: items for name, items in index.splits.items()}
    if own_test_split(index) is None:
        splits["train"], splits["test"] = split_off(index.splits["train"])
    if split not in splits:
        raise DataError(
            f"{index.name} has no {split} split (it has {', '.join(splits)}).",
            hint="Pass val_fraction=0.1 to take a validation split from the training images.",
        )
    return splits[split]
