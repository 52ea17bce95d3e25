"""From a model and pictures to numbers: the same ones by every way in."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitral
from tests.conftest import small_model
from tests.data.pictures import class_folders
from vitral.evaluation.label_map import read_label_map
from vitral.training.entry import train
from vitral.weights.checkpoint import Checkpoint, default_preprocess

TINY: dict[str, Any] = dict(
    model="vit-pico4",
    network=dict(width=48, depth=2, heads=3),
    image_size=16,
    batch_size=8,
    epochs=6,
    device="cpu",
    optim=dict(name="adamw", lr=3e-3),
)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "photos"
    class_folders(folder, {"red": 24, "green": 24, "blue": 24}, size=(20, 16), split="train")
    return class_folders(folder, {"red": 7, "green": 7, "blue": 7}, size=(20, 16), split="test")


@pytest.fixture(scope="module")
def run(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    list(train(photos, out=folder, **TINY))
    return folder


def checkpoint(labels: tuple[str, ...] | None, **fields: Any) -> Checkpoint:
    model = small_model(num_classes=len(labels) if labels else 3, **fields)
    return Checkpoint(model=model, preprocess=default_preprocess(model), labels=labels)


def test_a_run_is_measured_on_what_it_held_out(run: Path, photos: Path) -> None:
    told = json.loads((run / "report.json").read_text())["test"]
    own = vitral.evaluate(run)
    given = vitral.evaluate(run, photos)
    folder = vitral.evaluate(run / "model.safetensors", photos / "test")
    for found in (own, given, folder):
        assert found.scores.images == 21
        assert found.scores.top1 == told["top1"] > 0.9
        assert found.scores.loss == pytest.approx(told["loss"], rel=1e-5)
    assert own.confusion == told["confusion"]
    assert own.split == "the data's own test split"
    assert folder.split == "all pictures"


@pytest.mark.parametrize("batch_size", [1, 4, 64])
def test_the_last_partial_batch_counts(run: Path, batch_size: int) -> None:
    found = vitral.evaluate(run, batch_size=batch_size)
    assert found.scores.images == 21
    assert found.scores.loss == pytest.approx(vitral.evaluate(run).scores.loss, rel=1e-5)


def test_every_way_gives_the_same_probabilities(run: Path, photos: Path) -> None:
    files = sorted((photos / "test").glob("*/*.png"))
    predictor = vitral.Predictor(run)
    several = predictor(files)
    for file, found in zip(files, several, strict=True):
        pillow = Image.open(file)
        for picture in (file, str(file), file.read_bytes(), pillow, np.asarray(pillow)):
            alone = predictor(picture)
            assert [label for label, _ in alone.top(5)] == [label for label, _ in found.top(5)]
            np.testing.assert_allclose(alone.probabilities, found.probabilities, atol=1e-5)
    found = vitral.evaluate(run)
    right = np.mean([file.parent.name == told.label for file, told in zip(files, several, strict=True)])
    assert right == found.scores.top1
    by_hand = -np.mean(
        [np.log(p.probabilities[p.labels.index(f.parent.name)]) for f, p in zip(files, several, strict=True)]
    )
    assert found.scores.loss == pytest.approx(by_hand, rel=1e-4)


def test_odd_pictures_do_not_disturb_the_others(run: Path, photos: Path, tmp_path: Path) -> None:
    good = photos / "test" / "red" / "000.png"
    pixels = np.asarray(Image.open(good))
    predictor = vitral.Predictor(run)
    expected = predictor(good)
    mirrored = predictor(np.ascontiguousarray(pixels[:, ::-1])[:, ::-1])  # as OpenCV's users turn BGR around
    np.testing.assert_allclose(mirrored.probabilities, expected.probabilities, atol=1e-6)
    alpha = np.dstack([pixels, np.full(pixels.shape[:2], 255, np.uint8)])
    np.testing.assert_allclose(predictor(alpha).probabilities, expected.probabilities, atol=1e-6)
    (tmp_path / "cut.png").write_bytes(good.read_bytes()[:-200])
    with Image.open(tmp_path / "cut.png") as cut:
        told = list(predictor.stream([cut, good, np.zeros((2, 2, 9)), b""]))
    assert [type(found).__name__ for _, found in told] == ["Failure", "Prediction", "Failure", "Failure"]
    with pytest.raises(vitral.DataError, match="cannot be used: empty"):
        predictor(b"")
    with pytest.raises(vitral.DataError, match="and this is int"):
        predictor(3)  # type: ignore[call-overload]


def test_classes_are_matched_by_name(run: Path, tmp_path: Path) -> None:
    some = class_folders(tmp_path / "two", {"red": 4, "green": 4}, size=(16, 16))
    (some / "red").rename(some / "zzz")
    (some / "zzz").rename(some / "blue")  # the pictures are red, the truth now says blue
    found = vitral.evaluate(run, some)
    assert found.scores.images == 8
    assert found.per_class[found.classes.index("blue")].recall == 0.0
    assert found.confused[0] == ("blue", "red", 4)
    other = class_folders(tmp_path / "other", {"cat": 2, "dog": 2}, size=(16, 16))
    with pytest.raises(vitral.DataError, match=r"knows no 'cat'.*--label-map"):
        vitral.evaluate(run, other)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("map.json", '{"n01": "red", "n02": "green"}'),
        ("map.json", '{"n01": 2, "n02": 1}'),
        ("map.txt", "n01 2\nn02 1\n"),
        ("map.txt", "n01 red\nn02 green\n"),
        ("map.csv", "n01,red\nn02,green\n"),
        ("synsets.txt", "n00 Azure, Blue\nn02 Green one\nn01 Red one\n"),
    ],
)
def test_label_maps(run: Path, tmp_path: Path, name: str, text: str) -> None:
    """The model's labels are blue, green, red."""
    assert vitral.load(run / "model.safetensors").labels == ("blue", "green", "red")
    data = class_folders(tmp_path / "data", {"n01": 5, "n02": 5}, size=(16, 16))
    (tmp_path / name).write_text(text)
    assert vitral.evaluate(run, data, label_map=tmp_path / name).scores.top1 == 1.0


def test_label_maps_that_do_not_fit(run: Path, tmp_path: Path) -> None:
    data = class_folders(tmp_path / "data", {"n01": 2, "n02": 2}, size=(16, 16))
    for text, reason in (
        ('{"n01": "red"}', "no line for the class 'n02'"),
        ('{"n01": "pink", "n02": "red"}', "'pink' is none"),
        ('{"n01": 7, "n02": 1}', "7 is none"),
        ('{"n01": "red", "n02": "green", "n03": "bleu"}', "'bleu' is none"),  # one slip does not change the meaning
        ("[[1]]", "no line for the class"),
        ('{"n01": []}', "JSON object"),
        ("{", "no valid JSON"),
    ):
        (tmp_path / "map.json").write_text(text)
        with pytest.raises(vitral.DataError, match=reason):
            vitral.evaluate(run, data, label_map=tmp_path / "map.json")
    with pytest.raises(vitral.DataError, match="cannot be read"):
        read_label_map(tmp_path / "nothing.json")
    (tmp_path / "spaces.csv").write_text("golden retriever, 207\n")
    assert read_label_map(tmp_path / "spaces.csv") == [("golden retriever", "207")]


def test_real_labels_count_any_true_answer(run: Path, tmp_path: Path) -> None:
    data = tmp_path / "val"
    class_folders(data, {"red": 3, "green": 1}, size=(16, 16))
    for number, path in enumerate(sorted(data.glob("*/*.png")), 1):  # green first
        path.rename(path.with_name(f"ILSVRC2012_val_{number:08d}.png"))
    (tmp_path / "real.json").write_text(json.dumps([[0], [0, 2], [1], []]))
    found = vitral.evaluate(run, data, real=tmp_path / "real.json")
    assert found.scores.top1 == 1.0
    assert found.real == {"top1": pytest.approx(1 / 3), "images": 3}
    names = {f"ILSVRC2012_val_{k:08d}": [1, 2] for k in range(1, 5)}
    (tmp_path / "named.json").write_text(json.dumps(names))
    assert vitral.evaluate(run, data, real=tmp_path / "named.json").real == {"top1": 1.0, "images": 4}
    (tmp_path / "short.json").write_text("[[0]]")
    with pytest.raises(vitral.DataError, match="no labels from 0 to 2"):
        vitral.evaluate(run, data, real=tmp_path / "short.json")


def test_two_models_on_the_same_pictures(run: Path) -> None:
    labels = ("blue", "green", "red")
    found = vitral.evaluate(run, against=checkpoint(labels))
    told = found.against
    assert told is not None
    assert told["top1"] == pytest.approx(found.scores.top1 + told["difference"])
    assert told["low"] <= told["difference"] <= told["high"]
    assert told["disagreements"] == len(told["examples"]) > 0
    assert all(one["first"] != one["second"] for one in told["examples"])
    same = vitral.evaluate(run, against=run).against
    assert same is not None
    assert (same["difference"], same["is_clear"], same["disagreements"]) == (0.0, False, 0)


def test_features_are_measured_by_neighbours_and_a_few_shots(run: Path) -> None:
    found = vitral.evaluate(run, knn=5, few_shot=5)
    assert found.knn is not None
    assert found.few_shot is not None
    assert found.knn["top1"] > 0.9
    assert len(found.few_shot["seeds"]) == 3
    assert found.few_shot["top1"] == pytest.approx(np.mean(found.few_shot["seeds"]))
    assert found.few_shot["spread"] == pytest.approx(np.std(found.few_shot["seeds"], ddof=1))
    assert json.loads(json.dumps(found.as_dict()))["knn"]["k"] == 5
    with pytest.raises(vitral.ConfigError, match="measure features"):
        vitral.evaluate(run, knn=5, temperature=True)


def test_a_model_without_a_head_has_features_only(photos: Path) -> None:
    model = small_model(num_classes=0)
    bare = Checkpoint(model=model, preprocess=default_preprocess(model))
    with pytest.raises(vitral.ConfigError, match="no head"):
        vitral.evaluate(bare, photos)
    found = vitral.evaluate(bare, photos, knn=3)
    assert found.knn is not None
    assert found.knn["top1"] > 0.6  # colours are in the features of any network


def test_somebodys_model_stays_as_it_is(photos: Path) -> None:
    model = small_model(num_classes=0).train()
    before = {name: tensor.dtype for name, tensor in model.to(torch.bfloat16).state_dict().items()}
    vitral.evaluate(Checkpoint(model=model, preprocess=default_preprocess(model)), photos, knn=3)
    assert model.training
    assert {name: tensor.dtype for name, tensor in model.state_dict().items()} == before


def test_pictures_that_were_trained_on_are_never_measured_on(tmp_path: Path) -> None:
    """Also when others were added since: a hash of the names decides, so nobody changes sides."""
    data = class_folders(tmp_path / "data", {"red": 20, "green": 20}, size=(16, 16))
    list(train(data, out=tmp_path / "run", **{**TINY, "epochs": 1}))
    assert vitral.evaluate(tmp_path / "run", data).split == "about a fifth of each class, by a hash of the names"
    class_folders(data, {"red": 26, "green": 26}, size=(16, 16))
    found = vitral.evaluate(tmp_path / "run", data)
    assert found.split == "about a fifth of each class, by a hash of the names"
    assert found.scores.images < 20
    with pytest.raises(vitral.DataError, match="are not those"):
        vitral.evaluate(tmp_path / "run")


def test_memory_does_not_hold_the_pictures(run: Path, photos: Path) -> None:
    import weakref

    from vitral.data.batches import BatchLoader, ImageDataset
    from vitral.data.sources import open_dataset
    from vitral.inference.loaded_model import load_model
    from vitral.inference.pipeline import gather

    ready = load_model(run)
    items = open_dataset(photos).splits["test"]
    loader = BatchLoader(pictures=ImageDataset(items, ready.preprocess), batch_size=4, classes=3)
    batches: list[weakref.ref[object]] = []

    def compute(images: Any) -> torch.Tensor:
        batches.append(weakref.ref(images))
        return ready.logits(images)

    alive = [sum(batch() is not None for batch in batches) for _ in gather(loader, compute)]
    assert len(batches) == 6
    assert max(alive) <= 2


def test_labels_without_names_are_matched_by_number(photos: Path) -> None:
    assert vitral.evaluate(checkpoint(None), photos / "test").scores.images == 21
    data = photos / "test"
    model = small_model(num_classes=4)
    four = Checkpoint(model=model, preprocess=default_preprocess(model))
    with pytest.raises(vitral.DataError, match="4 classes without names"):
        vitral.evaluate(four, data)


def test_temperature_scaling_mends_a_model_that_is_too_sure(run: Path, photos: Path) -> None:
    loaded = vitral.load(run / "model.safetensors")
    with torch.no_grad():
        loaded.model.head.weight.normal_(std=4.0)  # sure of nonsense
    found = vitral.evaluate(loaded, photos / "train", temperature=True)
    assert found.calibration is not None
    assert found.scaled is not None
    assert found.scaled.temperature is not None
    assert found.scaled.temperature > 1.5
    assert found.scaled.error < found.calibration.error


def test_pictures_that_cannot_be_read_do_not_count_and_are_named(run: Path, tmp_path: Path) -> None:
    data = class_folders(tmp_path / "data", {"red": 5, "green": 5, "blue": 5}, size=(16, 16))
    (data / "red" / "001.png").write_bytes(b"")
    found = vitral.evaluate(run, data)
    assert found.scores.images == 14
    assert found.unreadable == (("red/001.png", "empty"),)


def test_the_worst_mistakes_are_the_surest(photos: Path) -> None:
    found = vitral.evaluate(checkpoint(("blue", "green", "red")), photos / "train")
    assert 0 < len(found.mistakes) <= 12
    sure = [mistake.probability for mistake in found.mistakes]
    assert sure == sorted(sure, reverse=True)
    assert all(mistake.truth != mistake.answer for mistake in found.mistakes)


def test_multi_label_data(tmp_path: Path) -> None:
    folder = class_folders(tmp_path / "p", {"red": 12, "green": 12, "blue": 12}, size=(16, 16))
    rows = [f"{path.relative_to(tmp_path)},{path.parent.name}|any" for path in sorted(folder.glob("*/*.png"))]
    (tmp_path / "labels.csv").write_text("image,labels\n" + "\n".join(rows) + "\n")
    list(train(tmp_path / "labels.csv", out=tmp_path / "run", **{**TINY, "epochs": 12}))
    found = vitral.evaluate(tmp_path / "run")
    assert found.mean_average_precision is not None
    assert found.mean_average_precision > 0.9
    assert found.confusion is None
    predictor = vitral.Predictor(tmp_path / "run")
    probabilities = predictor(folder / "red" / "000.png").probabilities
    assert probabilities.sum() > 1.3  # each label is a yes or no of its own
    assert vitral.load(tmp_path / "run" / "model.safetensors").multi_label
    page = json.loads((tmp_path / "run" / "report.json").read_text())
    assert page["test"]["mean_average_precision"] == pytest.approx(found.mean_average_precision)


def test_other_data_than_the_runs_are_said(run: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    text = (copy / "config.toml").read_text()
    changed = class_folders(tmp_path / "photos", {"red": 3, "green": 3}, size=(16, 16))
    line = next(line for line in text.splitlines() if line.startswith("data ="))
    (copy / "config.toml").write_text(text.replace(line, f'data = "{changed}"'))
    with pytest.raises(vitral.DataError, match="are not those"):
        vitral.evaluate(copy)
    with pytest.raises(vitral.ConfigError, match="no data to measure on"):
        vitral.evaluate(run / "model.safetensors")


@pytest.mark.parametrize("dialect", ["native", "timm", "huggingface", "torchvision"])
def test_checkpoints_remember_that_labels_may_be_several(tmp_path: Path, dialect: str) -> None:
    model = small_model(image_size=16)
    kept = Checkpoint(model=model, preprocess=default_preprocess(model), multi_label=True)
    vitral.save(kept, tmp_path / "x.safetensors", dialect=dialect)
    assert vitral.load(tmp_path / "x.safetensors").multi_label
    assert not vitral.load(tmp_path / "x.safetensors", num_classes=3).multi_label  # a fresh head has no past


def test_more_shots_than_pictures(run: Path, photos: Path, tmp_path: Path) -> None:
    with pytest.raises(vitral.ConfigError, match="few_shot=25 must be at most 24"):
        vitral.evaluate(run / "model.safetensors", photos, few_shot=25)
    class_folders(tmp_path, {"red": 3, "green": 9, "blue": 9}, size=(16, 16), split="train")
    class_folders(tmp_path, {"red": 2, "green": 2, "blue": 2}, size=(16, 16), split="test")
    found = vitral.evaluate(run / "model.safetensors", tmp_path, few_shot=(5, 5))
    assert found.notes == ("not all classes have 5 training pictures: red has 3",)
    assert found.few_shot is not None
    assert "each" not in found.few_shot  # five is five


def test_numbers_in_the_place_of_names_are_told(run: Path, tmp_path: Path) -> None:
    class_folders(tmp_path, {"0": 3, "1": 3, "2": 3}, size=(16, 16))
    assert vitral.evaluate(run, tmp_path).notes == (
        "the data's classes are numbers, and were taken for the model's labels: 0 is blue",
    )
