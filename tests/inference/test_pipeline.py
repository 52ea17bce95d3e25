"""Running a model over a split."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from vitral.data.sources import open_dataset
from vitral.errors import DataError
from vitral.inference.loaded_model import load_model
from vitral.inference.pipeline import make_loader, run_model


def test_memory_does_not_hold_the_images(run: Path, photos: Path) -> None:
    model = load_model(run)
    loader = make_loader(model, open_dataset(photos).splits["test"], batch_size=4)
    batches: list[weakref.ref[object]] = []

    def compute(images: Any) -> torch.Tensor:
        batches.append(weakref.ref(images))
        return model.logits(images)

    alive = [sum(batch() is not None for batch in batches) for _ in run_model(loader, compute)]
    assert len(batches) == 6
    assert max(alive) <= 2


def test_outputs_are_in_order_and_unreadable_images_are_listed(run: Path, tmp_path: Path) -> None:
    from tests.data.images import class_folders

    data = class_folders(tmp_path, {"red": 4, "green": 4}, size=(16, 16))
    (data / "green" / "002.png").write_bytes(b"")
    model = load_model(run)
    events = run_model(make_loader(model, open_dataset(data).splits["train"], batch_size=3), model.logits)
    done = []
    while True:
        try:
            done.append(next(events).done)
        except StopIteration as end:
            outputs = end.value
            break
    assert done == [3, 6, 8]
    assert outputs.unreadable == (("green/002.png", "empty"),)
    assert outputs.indices.tolist() == [0, 1, 3, 4, 5, 6, 7]
    assert outputs.keys[2:4] == ["green/003.png", "red/000.png"]
    assert outputs.outputs.shape == (7, 3)


def test_a_split_without_a_readable_image_is_refused(run: Path, tmp_path: Path) -> None:
    from tests.data.images import class_folders

    data = class_folders(tmp_path, {"red": 1, "green": 1}, size=(16, 16))
    for path in data.glob("*/*.png"):
        path.write_bytes(b"")
    model = load_model(run)
    with pytest.raises(DataError, match="None of the 2 images.*empty"):
        list(run_model(make_loader(model, open_dataset(data).splits["train"]), model.logits))
