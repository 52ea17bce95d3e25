"""A model over a split: what it makes of every picture, the last partial batch included."""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from vitral.data.batches import BatchLoader
from vitral.data.dataset import Item
from vitral.data.scan import Progress
from vitral.errors import DataError

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class ModelOutputs:
    items: Sequence[Item]
    rows: Tensor
    """Logits (N, K), or features (N, D), of the pictures that could be read."""
    labels: Tensor
    order: Tensor
    """Which items the rows are."""
    unreadable: tuple[tuple[str, str], ...]
    """Names and reasons of the others."""

    @property
    def keys(self) -> list[str]:
        return [self.items[number].key for number in self.order.tolist()]

    @property
    def right(self) -> Tensor:
        """(N,): whether the largest logit is a true class."""
        best = self.rows.argmax(1)
        return best == self.labels if self.labels.ndim == 1 else self.labels.gather(1, best[:, None])[:, 0] > 0


def gather(
    loader: BatchLoader, compute: Callable[[Tensor | list[Tensor]], Tensor]
) -> "Generator[Progress, None, ModelOutputs]":
    """Every batch through the model, told while it goes on."""
    rows: list[Tensor] = []
    labels: list[Tensor] = []
    order: list[Tensor] = []
    bad: list[tuple[int, str]] = []
    done, total, items = 0, len(loader.pictures), loader.pictures.items
    for batch in loader.epoch():
        bad += batch.bad
        if len(batch.items):
            rows.append(compute(batch.images))
            labels.append(batch.labels)
            order.append(batch.items)
        done += len(batch.items) + len(batch.bad)
        yield Progress(done=done, total=total)
    if not rows:
        raise DataError(f"None of the {total} pictures can be read{f': {bad[0][1]}' if bad else ''}.")
    return ModelOutputs(
        items=items,
        rows=torch.cat(rows),
        labels=torch.cat(labels),
        order=torch.cat(order),
        unreadable=tuple((items[index].key, reason) for index, reason in bad),
    )


def finished(events: "Iterator[Progress | Result]") -> Result:
    """The last of the events, the others passed over."""
    *_, last = events
    assert not isinstance(last, Progress)
    return last
