"""Run a model over a split, batch by batch, and collect its outputs."""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from vitral.collectives import gather, is_shared
from vitral.data.batches import Batch, BatchLoader, ImageDataset
from vitral.data.dataset import Item
from vitral.data.prefetch import loading_threads
from vitral.data.scan import Progress
from vitral.devices import World
from vitral.errors import DataError

if TYPE_CHECKING:
    from vitral.inference.exported_model import ExportedModel
    from vitral.inference.loaded_model import LoadedModel

Compute = Callable[[Tensor | list[Tensor]], Tensor]
"""Return one row per image of a batch."""


@dataclass(frozen=True, slots=True)
class JointCompute:
    """A computation in which all processes take part: one without images in a batch runs it on an example."""

    compute: Compute
    example: Tensor

    def __call__(self, images: Tensor | list[Tensor]) -> Tensor:
        return self.compute(images)

    def run_example(self) -> None:
        self.compute(self.example)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOutputs:
    """The outputs of a model for the readable images of a split."""

    items: Sequence[Item]
    """All images of the split, unreadable ones included."""
    outputs: Tensor
    """Logits (N, K) or features (N, D), one row per readable image."""
    labels: Tensor
    """(N,) classes, or (N, K) of 0 and 1 for multi-label data."""
    indices: Tensor
    """(N,): the index in ``items`` of each row."""
    unreadable: tuple[tuple[str, str], ...]
    """Names of the unreadable images, each with the reason."""
    cached: int = 0
    """How many of the items were read from the cache instead of computed."""

    @property
    def keys(self) -> list[str]:
        """Return the name of the image of each row."""
        return [self.items[int(index)].key for index in self.indices.numpy()]

    @property
    def correct(self) -> Tensor:
        """Return (N,) booleans: whether the largest logit is a true class."""
        predicted = self.outputs.argmax(1)
        if self.labels.ndim == 1:
            return predicted == self.labels
        return self.labels.gather(1, predicted[:, None])[:, 0] > 0


def make_loader(
    model: "LoadedModel | ExportedModel",
    items: Sequence[Item],
    *,
    multi_label: bool = False,
    batch_size: int = 64,
    workers: int = 0,
    world: World = World(),  # noqa: B008 (frozen)
) -> BatchLoader:
    """Return a loader that preprocesses the images as the model expects them, in order."""
    return BatchLoader(
        images=ImageDataset(items, model.preprocess, patch=model.step_hw),
        batch_size=batch_size,
        classes=len(model.labels),
        multi_label=multi_label,
        workers=workers,
        threads=loading_threads(),
        rank=world.rank,
        world=world.size,
    )


class Images(Protocol):
    """The images of a loader."""

    @property
    def items(self) -> Sequence[Item]: ...
    def __len__(self) -> int: ...


class Loader(Protocol):
    """Yields batches of images, or of tensors computed from them."""

    @property
    def images(self) -> Images: ...
    @property
    def world(self) -> int: ...
    def epoch(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]: ...


def run_model(loader: Loader, compute: Compute) -> Generator[Progress, None, ModelOutputs]:
    """Yield progress and return the outputs of ``compute`` for every batch. Raise DataError if no image is readable."""
    outputs = yield from run_batches(loader.epoch(), compute, loader.images.items)
    if loader.world > 1:
        outputs = share_outputs(outputs)
    if not len(outputs.outputs):
        raise no_readable_image(outputs.items, outputs.unreadable)
    return outputs


def share_outputs(outputs: ModelOutputs) -> ModelOutputs:
    """Return the outputs of all processes of a command, in each of them."""
    return join_outputs(gather(outputs_of(outputs)), outputs.items) if is_shared() else outputs


def outputs_of(outputs: ModelOutputs) -> "Rows":
    """Return what another process needs."""
    return outputs.outputs, outputs.labels, outputs.indices, outputs.unreadable


Rows = tuple[Tensor, Tensor, Tensor, tuple[tuple[str, str], ...]]


def join_outputs(parts: Sequence[Rows], items: Sequence[Item]) -> ModelOutputs:
    """Return the outputs of all processes in the order of the items, as one process would have computed them."""
    filled = [part for part in parts if len(part[2])] or parts[:1]
    outputs, labels, indices = map(torch.cat, zip(*(part[:3] for part in filled), strict=True))
    order = indices.argsort(stable=True)
    unreadable = [bad for part in parts for bad in part[3]]
    if unreadable:
        position = {item.key: number for number, item in enumerate(items)}
        unreadable.sort(key=lambda bad: position[bad[0]])
    return ModelOutputs(
        items=items,
        outputs=outputs[order],
        labels=labels[order],
        indices=indices[order],
        unreadable=tuple(unreadable),
    )


def run_batches(
    batches: Iterable[Batch], compute: Compute, items: Sequence[Item], *, done: int = 0
) -> Generator[Progress, None, ModelOutputs]:
    """Yield progress, which starts at ``done``, and return the outputs for these batches of the items."""
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    bad: list[tuple[int, str]] = []
    for batch in batches:
        bad += batch.bad
        if len(batch.items):
            parts.append((compute(batch.images), batch.labels, batch.items))
        elif isinstance(compute, JointCompute):
            compute.run_example()
        done += len(batch.items) + len(batch.bad)
        yield Progress(done=done, total=len(items))
    none = torch.empty(0, dtype=torch.long)
    outputs, labels, indices = map(torch.cat, zip(*parts, strict=True)) if parts else (torch.empty(0, 0), none, none)
    unreadable = tuple((items[index].key, reason) for index, reason in bad)
    return ModelOutputs(items=items, outputs=outputs, labels=labels, indices=indices, unreadable=unreadable)


def no_readable_image(items: Sequence[Item], unreadable: Sequence[tuple[str, str]]) -> DataError:
    """Return the error of a split without a readable image, with the reason of the first."""
    reason = f": {unreadable[0][1]}" if unreadable else ""
    return DataError(f"None of the {len(items)} images is readable{reason}.")
