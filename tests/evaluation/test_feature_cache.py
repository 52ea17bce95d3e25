"""Features that are kept: the same answers, found again, and never those of other weights or pictures."""

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vitral
from tests.cli.typed import typed as run
from tests.data.pictures import class_folders
from vitral.evaluation import feature_cache
from vitral.evaluation.evaluator import evaluate


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
    """Batches that went through a network."""
    from vitral.inference.loaded_model import LoadedModel

    seen: list[int] = []
    original = LoadedModel.features
    monkeypatch.setattr(
        LoadedModel, "features", lambda self, images: (seen.append(len(images)), original(self, images))[1]
    )
    return seen


def test_what_was_computed_is_found_again(cache: Path, data: Path, weights: Path, passes: list[int]) -> None:
    first = evaluate(weights, data, knn=3, few_shot=(1, 5))
    assert sum(passes) == 40
    again = evaluate(weights, data, knn=3, few_shot=(1, 5))
    assert sum(passes) == 40  # nothing more
    assert first.images_per_second is not None
    assert again.images_per_second is None  # the disk says nothing about the network's speed
    assert len(list(cache.glob("*.npz"))) == 2
    for one in (again, evaluate(weights, data, knn=3, few_shot=(1, 5), cache=False)):
        assert (one.knn, one.few_shot) == (first.knn, first.few_shot)
    assert sum(passes) == 80


def test_a_few_shots_ask_for_a_few_pictures(data: Path, weights: Path, passes: list[int]) -> None:
    few = evaluate(weights, data, few_shot=(1, 2), cache=False)
    assert 16 + 4 < sum(passes) <= 16 + 12  # the test pictures, and at most two a class for each of three seeds
    assert few.few_shot == evaluate(weights, data, few_shot=(1, 2), knn=3, cache=False).few_shot


def test_a_few_shots_are_found_among_all(cache: Path, data: Path, weights: Path, passes: list[int]) -> None:
    evaluate(weights, data, knn=3)
    computed = sum(passes)
    evaluate(weights, data, few_shot=2)
    assert sum(passes) == computed


@pytest.mark.parametrize("change", ["weights", "picture", "size", "precision", "more pictures"])
def test_what_changed_is_computed(
    cache: Path, data: Path, weights: Path, passes: list[int], change: str, tmp_path: Path
) -> None:
    evaluate(weights, data, knn=3)
    before = sum(passes)
    how: dict[str, Any] = {}
    if change == "weights":
        checkpoint = vitral.load(weights)
        with torch.no_grad():
            next(checkpoint.model.parameters())[0, 0] += 1e-3
        weights = tmp_path / "other.safetensors"
        vitral.save(checkpoint, weights)
    if change == "picture":
        one = data / "test" / "red" / "003.png"
        one.write_bytes((data / "test" / "green" / "003.png").read_bytes())
    if change == "more pictures":
        (data / "test" / "red" / "new.png").write_bytes((data / "test" / "red" / "001.png").read_bytes())
    if change == "size":
        how["image_size"] = 35
    if change == "precision":
        how["precision"] = "bfloat16"
    evaluate(weights, data, knn=3, **how)
    expected = {"picture": 16, "more pictures": 17}.get(change, 40)  # the other split is as it was
    assert sum(passes) - before == expected


def test_a_damaged_file_is_computed_again(cache: Path, data: Path, weights: Path, passes: list[int]) -> None:
    first = evaluate(weights, data, knn=3)
    for path in cache.glob("*.npz"):
        path.write_bytes(path.read_bytes()[:100])
    assert evaluate(weights, data, knn=3).knn == first.knn
    assert sum(passes) == 80


def test_bad_pictures_are_remembered_as_such(cache: Path, data: Path, weights: Path) -> None:
    (data / "test" / "red" / "003.png").write_bytes(b"")
    found = [evaluate(weights, data, knn=3) for _ in range(2)]
    assert found[0].unreadable == found[1].unreadable == (("test/red/003.png", "empty"),)


def test_the_oldest_go_first(cache: Path, monkeypatch: pytest.MonkeyPatch, data: Path, weights: Path) -> None:
    evaluate(weights, data, knn=3)
    first = set(cache.glob("*.npz"))
    pair = sum(path.stat().st_size for path in first)
    monkeypatch.setattr(feature_cache, "LARGEST", pair + 100)
    evaluate(weights, data, knn=3, image_size=35)
    left = set(cache.glob("*.npz"))
    assert len(left) == 2
    assert not left & first


def test_features_that_are_too_large_leave_the_others_alone(
    cache: Path, monkeypatch: pytest.MonkeyPatch, data: Path, weights: Path
) -> None:
    evaluate(weights, data, knn=3)
    first = set(cache.glob("*.npz"))
    monkeypatch.setattr(feature_cache, "LARGEST", 3_000)  # smaller than the rows of either split
    evaluate(weights, data, knn=3, image_size=35)
    assert set(cache.glob("*.npz")) == first


def test_what_a_killed_process_left_behind_goes(cache: Path, data: Path, weights: Path) -> None:
    cache.mkdir(parents=True)
    for name, age in (("old", 2 * 24 * 3600), ("new", 60)):
        (cache / f"{name}.part").write_bytes(b"half")
        os.utime(cache / f"{name}.part", (time.time() - age,) * 2)
    evaluate(weights, data, knn=3)
    assert [path.name for path in cache.glob("*.part")] == ["new.part"]


def test_several_shots_on_the_command_line(cache: Path, data: Path, weights: Path) -> None:
    page = run("evaluate", str(weights), str(data), "--few-shot", "1,5,10").stdout
    assert all(f"{shots} a class, closed form" in page for shots in (1, 5, 10))
    assert "spread" in page
    wrong = run("evaluate", str(weights), str(data), "--few-shot", "1,x")
    assert wrong.returncode == 2
    assert "must be a whole number or several" in wrong.stderr


@pytest.mark.parametrize("what", ["cut", "nan", "turned"])
def test_a_file_that_somebody_wrote_into_is_not_believed(cache: Path, data: Path, weights: Path, what: str) -> None:
    first = evaluate(weights, data, knn=3)
    for path in cache.glob("*.npz"):
        with np.load(path) as kept:
            arrays = dict(kept)
        if what == "cut":
            arrays["rows"] = arrays["rows"][:3]
        elif what == "nan":
            arrays["rows"] = np.full_like(arrays["rows"], np.nan)
        else:
            arrays["order"] = arrays["order"] + 99
        np.savez(path, **arrays)
    assert evaluate(weights, data, knn=3).knn == first.knn


def test_a_place_that_cannot_be_written_to_costs_nothing(
    data: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VITRAL_CACHE", str(weights))  # a file where a folder should be
    assert evaluate(weights, data, knn=3).knn is not None
