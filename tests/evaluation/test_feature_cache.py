"""Cached features: the same results, read from disk, and never those of other weights or images."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ImageOps

import vitral
from tests.cli.typed import typed as run
from tests.data.images import class_folders, photo
from vitral.data.dataset import Item
from vitral.data.sources import open_dataset
from vitral.evaluation import feature_cache
from vitral.evaluation.evaluator import evaluate
from vitral.evaluation.feature_cache import cached_features
from vitral.inference.loaded_model import load_model
from vitral.inference.pipeline import ModelOutputs, make_loader


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VITRAL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "features"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for split, number in (("train", 12), ("test", 8)):
        class_folders(tmp_path / "data", {"red": number, "green": number}, size=(28, 28), split=split)
    return tmp_path / "data"


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    vitral.save(vitral.create("vit-pico7", num_classes=0), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the batches that a network computed."""
    from vitral.inference.loaded_model import LoadedModel

    sizes: list[int] = []
    original = LoadedModel.features
    monkeypatch.setattr(
        LoadedModel, "features", lambda self, images: (sizes.append(len(images)), original(self, images))[1]
    )
    return sizes


def test_computed_features_are_read_from_the_cache(cache: Path, data: Path, weights: Path, passes: list[int]) -> None:
    first = evaluate(weights, data, knn=3, few_shot=(1, 5))
    assert sum(passes) == 40
    again = evaluate(weights, data, knn=3, few_shot=(1, 5))
    assert sum(passes) == 40  # no more batches
    assert first.images_per_second is not None
    assert again.images_per_second is None  # reading a file is not the speed of the network
    assert len(list(cache.glob("*.npz"))) == 2
    for evaluation in (again, evaluate(weights, data, knn=3, few_shot=(1, 5), cache=False)):
        assert (evaluation.knn, evaluation.few_shot) == (first.knn, first.few_shot)
    assert sum(passes) == 80


def test_few_shot_computes_only_the_images_it_draws(data: Path, weights: Path, passes: list[int]) -> None:
    few = evaluate(weights, data, few_shot=(1, 2), cache=False)
    assert 16 + 4 < sum(passes) <= 16 + 12  # at most two per class for each of three seeds
    assert few.few_shot == evaluate(weights, data, few_shot=(1, 2), knn=3, cache=False).few_shot


def test_few_shot_uses_the_cached_features_of_all_images(
    cache: Path, data: Path, weights: Path, passes: list[int]
) -> None:
    evaluate(weights, data, knn=3)
    computed = sum(passes)
    evaluate(weights, data, few_shot=2)
    assert sum(passes) == computed


@pytest.mark.parametrize("change", ["weights", "image", "size", "precision", "more images"])
def test_changed_inputs_are_computed_again(
    cache: Path, data: Path, weights: Path, passes: list[int], change: str, tmp_path: Path
) -> None:
    evaluate(weights, data, knn=3)
    before = sum(passes)
    options: dict[str, Any] = {}
    if change == "weights":
        checkpoint = vitral.load(weights)
        with torch.no_grad():
            next(checkpoint.model.parameters())[0, 0] += 1e-3
        weights = tmp_path / "other.safetensors"
        vitral.save(checkpoint, weights)
    if change == "image":
        (data / "test" / "red" / "003.png").write_bytes((data / "test" / "green" / "003.png").read_bytes())
    if change == "more images":
        (data / "test" / "red" / "new.png").write_bytes((data / "test" / "red" / "001.png").read_bytes())
    if change == "size":
        options["image_size"] = 35
    if change == "precision":
        options["precision"] = "bfloat16"
    evaluate(weights, data, knn=3, **options)
    expected = {"image": 16, "more images": 17}.get(change, 40)  # the other split is unchanged
    assert sum(passes) - before == expected


def test_a_damaged_file_is_computed_again(cache: Path, data: Path, weights: Path, passes: list[int]) -> None:
    first = evaluate(weights, data, knn=3)
    for path in cache.glob("*.npz"):
        path.write_bytes(path.read_bytes()[:100])
    assert evaluate(weights, data, knn=3).knn == first.knn
    assert sum(passes) == 80


def test_unreadable_images_are_cached_as_such(cache: Path, data: Path, weights: Path) -> None:
    (data / "test" / "red" / "003.png").write_bytes(b"")
    first, cached = (evaluate(weights, data, knn=3) for _ in range(2))
    assert first.unreadable == cached.unreadable == (("test/red/003.png", "empty"),)


def test_features_that_are_too_large_leave_the_others_alone(
    cache: Path, monkeypatch: pytest.MonkeyPatch, data: Path, weights: Path
) -> None:
    evaluate(weights, data, knn=3)
    first = set(cache.glob("*.npz"))
    assert len(first) == 2
    monkeypatch.setenv("VITRAL_CACHE_LIMIT", "500")  # smaller than the features of either split
    evaluate(weights, data, knn=3, image_size=35)
    assert set(cache.glob("*.npz")) == first


def test_several_shots_on_the_command_line(cache: Path, data: Path, weights: Path) -> None:
    page = run("evaluate", str(weights), str(data), "--few-shot", "1,5,10").stdout
    assert all(f"{shots}-shot accuracy" in page for shots in (1, 5, 10))
    assert "standard deviation" in page
    wrong = run("evaluate", str(weights), str(data), "--few-shot", "1,x")
    assert wrong.returncode == 2
    assert "--few-shot" in wrong.stderr


@pytest.mark.parametrize("edit", ["cut", "nan", "shifted"])
def test_an_edited_file_is_ignored(cache: Path, data: Path, weights: Path, edit: str) -> None:
    first = evaluate(weights, data, knn=3)
    for path in cache.glob("*.npz"):
        with np.load(path) as content:
            arrays = dict(content)
        if edit == "cut":
            arrays["rows"] = arrays["rows"][:3]
        elif edit == "nan":
            arrays["rows"] = np.full_like(arrays["rows"], np.nan)
        else:
            arrays["order"] = arrays["order"] + 99
        np.savez(path, **arrays)
    assert evaluate(weights, data, knn=3).knn == first.knn


def test_a_cache_that_cannot_be_written_is_not_needed(
    data: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VITRAL_CACHE", str(weights))  # a file in place of a folder
    assert evaluate(weights, data, knn=3).knn is not None


# ---- chunks ----


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_cache, "CHUNK_IMAGES", 8)


def features(weights: Path, items: Sequence[Item], batch_size: int = 4, **options: Any) -> ModelOutputs:
    """Return the features of the images and check that the progress never goes back."""
    progress, last = cached_features(load_model(weights), items, batch_size=batch_size, **options), 0
    while True:
        try:
            event = next(progress)
        except StopIteration as end:
            assert last in (0, len(items))
            return end.value
        assert last < event.done <= event.total == len(items)
        last = event.done


def assert_equal(first: ModelOutputs, second: ModelOutputs) -> None:
    """Compare bit for bit."""
    for field in ("outputs", "labels", "indices"):
        assert torch.equal(getattr(first, field), getattr(second, field)), field
    assert (first.keys, first.unreadable) == (second.keys, second.unreadable)


@pytest.mark.usefixtures("small_chunks")
def test_only_missing_chunks_are_computed(cache: Path, data: Path, weights: Path, passes: list[int]) -> None:
    items = (*open_dataset(data).splits["train"], *open_dataset(data).splits["test"])
    for item in (*items[8:16], items[19]):  # the second chunk has no readable image
        Path(getattr(item.source, "path")).write_bytes(b"")  # noqa: B009 - other sources have none
    expected = features(weights, items, cache=False)
    assert len(expected.unreadable) == 9
    assert not cache.exists()
    assert_equal(features(weights, items), expected)
    assert_equal(features(weights, items), expected)
    assert len(list(cache.iterdir())) == 5
    passes.clear()
    loader = make_loader(load_model(weights), items, batch_size=4)
    keys = feature_cache._chunk_keys(feature_cache.model_digest(load_model(weights)), loader, mirrored=False)
    for start in (0, 16, 24):  # a gap of one chunk and one of two
        (cache / keys[start]).unlink()
    again = features(weights, items)
    assert_equal(again, expected)
    assert again.cached == 16
    assert sum(passes) == 8 + 7 + 8
    assert len(list(cache.iterdir())) == 5


@pytest.mark.usefixtures("cache", "small_chunks")
def test_labels_are_those_of_the_dataset_and_not_of_the_cache(data: Path, weights: Path) -> None:
    items = open_dataset(data).splits["train"]
    features(weights, items)
    relabeled = [replace(item, label=1 - int(item.labels[0])) for item in items]
    again = features(weights, relabeled)
    assert again.cached == len(items)
    assert again.labels.tolist() == [item.label for item in relabeled]


@pytest.mark.usefixtures("cache")
def test_mirrored_features_are_those_of_mirrored_images(tmp_path: Path, weights: Path) -> None:
    for folder, turn in (("plain", lambda image: image), ("mirrored", ImageOps.mirror)):
        (tmp_path / folder / "a").mkdir(parents=True)
        for seed in range(5):
            turn(photo(28, 28, seed)).save(tmp_path / folder / "a" / f"{seed}.png")
    plain, mirrored = (open_dataset(tmp_path / folder).splits["train"] for folder in ("plain", "mirrored"))
    expected = features(weights, mirrored)
    assert torch.equal(features(weights, plain, mirrored=True).outputs, expected.outputs)
    assert not torch.equal(features(weights, plain).outputs, expected.outputs)
    assert features(weights, plain, mirrored=True).cached == 5


@pytest.mark.skipif(os.name == "nt", reason="needs kill -9")
def test_a_killed_evaluation_continues_bit_for_bit(cache: Path, tmp_path: Path, passes: list[int]) -> None:
    """Kill a real command after its first chunk; what it kept and what is computed now equal an undisturbed pass."""
    torch.manual_seed(0)
    weights = tmp_path / "digits.safetensors"
    vitral.save(vitral.create("vit-pico7", num_classes=0, depth=1, channels=1, image_size=28), weights)
    command = [sys.executable, "-m", "vitral", "evaluate", str(weights), "builtin:digits", "--knn", "3"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while not list(cache.glob("*.npz")):
            assert process.poll() is None
            time.sleep(0.002)
        process.kill()
    kept = 1024 * len(list(cache.glob("*.npz")))
    items = open_dataset("builtin:digits").splits["train"]
    resumed, undisturbed = (features(weights, items, batch_size=64, cache=is_cached) for is_cached in (True, False))
    assert 1024 <= resumed.cached == kept < len(items) == 4000
    assert sum(passes) == len(items) - kept + len(items)
    assert_equal(resumed, undisturbed)
