"""`vitral.evaluate`: which images it uses, what it reports, and what it refuses."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vitral
from tests.conftest import small_model
from tests.data.images import class_folders
from tests.evaluation.conftest import TINY
from vitral.data.dataset import FileSource, Item
from vitral.evaluation.results import summarize
from vitral.inference.pipeline import ModelOutputs
from vitral.weights.checkpoint import Checkpoint, default_preprocess


def checkpoint(labels: tuple[str, ...] | None, **fields: Any) -> Checkpoint:
    model = small_model(**{"num_classes": len(labels) if labels else 3, **fields})
    return Checkpoint(model=model, preprocess=default_preprocess(model), labels=labels)


# ---- which images ----


def test_a_run_is_evaluated_on_its_test_split(run: Path, photos: Path) -> None:
    report = json.loads((run / "report.json").read_text())["test"]
    default = vitral.evaluate(run)
    named = vitral.evaluate(run, photos)
    folder = vitral.evaluate(run / "model.safetensors", photos / "test")
    for evaluation in (default, named, folder):
        assert evaluation.scores.images == 21
        assert evaluation.scores.top1 == report["top1"] > 0.9
        assert evaluation.scores.loss == pytest.approx(report["loss"], rel=1e-5)
    assert default.confusion == report["confusion"]
    assert default.split == "the dataset's test split"
    assert folder.split == "all images"


@pytest.mark.parametrize("batch_size", [1, 4, 64])
def test_the_last_partial_batch_counts(run: Path, batch_size: int) -> None:
    evaluation = vitral.evaluate(run, batch_size=batch_size)
    assert evaluation.scores.images == 21
    assert evaluation.scores.loss == pytest.approx(vitral.evaluate(run).scores.loss, rel=1e-5)


def test_training_images_are_never_evaluated_even_after_others_were_added(tmp_path: Path) -> None:
    """A hash of the name assigns each image to a split, so none changes sides."""
    data = class_folders(tmp_path / "data", {"red": 20, "green": 20}, size=(16, 16))
    vitral.train(data, out=tmp_path / "run", **{**TINY, "epochs": 1})
    before = vitral.evaluate(tmp_path / "run", data)
    class_folders(data, {"red": 26, "green": 26}, size=(16, 16))
    after = vitral.evaluate(tmp_path / "run", data)
    assert before.split == after.split
    assert "fifth" in after.split
    assert before.scores.images <= after.scores.images < 20
    with pytest.raises(vitral.DataError, match="has changed"):
        vitral.evaluate(tmp_path / "run")


def test_a_run_whose_dataset_was_replaced_is_refused(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    text = (copy / "config.toml").read_text()
    replaced = class_folders(tmp_path / "photos", {"red": 3, "green": 3}, size=(16, 16))
    line = next(line for line in text.splitlines() if line.startswith("data ="))
    (copy / "config.toml").write_text(text.replace(line, f'data = "{replaced}"'))
    with pytest.raises(vitral.DataError, match="has changed"):
        vitral.evaluate(copy)
    with pytest.raises(vitral.ConfigError, match="no dataset to evaluate on"):
        vitral.evaluate(run / "model.safetensors")


def test_unreadable_images_are_listed_and_not_counted(run: Path, tmp_path: Path) -> None:
    data = class_folders(tmp_path / "data", {"red": 5, "green": 5, "blue": 5}, size=(16, 16))
    (data / "red" / "001.png").write_bytes(b"")
    evaluation = vitral.evaluate(run, data)
    assert evaluation.scores.images == 14
    assert evaluation.unreadable == (("red/001.png", "empty"),)


# ---- labels ----


def test_classes_are_matched_by_name(run: Path, tmp_path: Path) -> None:
    data = class_folders(tmp_path / "two", {"red": 4, "green": 4}, size=(16, 16))
    (data / "red").rename(data / "blue")  # the images are red, their labels now blue
    evaluation = vitral.evaluate(run, data)
    assert evaluation.scores.images == 8
    assert evaluation.per_class[evaluation.classes.index("blue")].recall == 0.0
    assert evaluation.confused[0] == ("blue", "red", 4)
    other = class_folders(tmp_path / "other", {"cat": 2, "dog": 2}, size=(16, 16))
    with pytest.raises(vitral.DataError, match=r"'cat'.*--label-map"):
        vitral.evaluate(run, other)


def test_numbers_for_class_names_are_noted(run: Path, tmp_path: Path) -> None:
    class_folders(tmp_path, {"0": 3, "1": 3, "2": 3}, size=(16, 16))
    (note,) = vitral.evaluate(run, tmp_path).notes
    assert "0 is blue" in note


def test_labels_without_names_are_matched_by_position(photos: Path) -> None:
    assert vitral.evaluate(checkpoint(None), photos / "test").scores.images == 21
    with pytest.raises(vitral.DataError, match="4 classes without names"):
        vitral.evaluate(checkpoint(None, num_classes=4), photos / "test")


def test_real_labels_accept_any_true_label(run: Path, tmp_path: Path) -> None:
    data = tmp_path / "val"
    class_folders(data, {"red": 3, "green": 1}, size=(16, 16))
    for number, path in enumerate(sorted(data.glob("*/*.png")), 1):  # green first
        path.rename(path.with_name(f"ILSVRC2012_val_{number:08d}.png"))
    (tmp_path / "real.json").write_text(json.dumps([[0], [0, 2], [1], []]))
    evaluation = vitral.evaluate(run, data, real=tmp_path / "real.json")
    assert evaluation.scores.top1 == 1.0
    assert evaluation.real == {"top1": pytest.approx(1 / 3), "images": 3}
    names = {f"ILSVRC2012_val_{k:08d}": [1, 2] for k in range(1, 5)}
    (tmp_path / "named.json").write_text(json.dumps(names))
    assert vitral.evaluate(run, data, real=tmp_path / "named.json").real == {"top1": 1.0, "images": 4}
    (tmp_path / "short.json").write_text("[[0]]")
    with pytest.raises(vitral.DataError, match="no labels from 0 to 2"):
        vitral.evaluate(run, data, real=tmp_path / "short.json")


# ---- a second model ----


def test_two_models_are_compared_on_the_same_images(run: Path) -> None:
    evaluation = vitral.evaluate(run, against=checkpoint(("blue", "green", "red")))
    against = evaluation.against
    assert against is not None
    assert against["top1"] == pytest.approx(evaluation.scores.top1 + against["difference"])
    assert against["low"] <= against["difference"] <= against["high"]
    assert against["disagreements"] == len(against["examples"]) > 0
    assert all(example["first"] != example["second"] for example in against["examples"])
    same = vitral.evaluate(run, against=run).against
    assert same is not None
    assert (same["difference"], same["is_clear"], same["disagreements"]) == (0.0, False, 0)


def test_a_second_model_with_other_labels_is_refused_without_a_label_map(run: Path, tmp_path: Path) -> None:
    """Even if the classes are numbers, which the first model accepts as positions."""
    numbered = class_folders(tmp_path / "numbered", {"0": 3, "1": 3, "2": 3}, size=(16, 16))
    other = checkpoint(("airplane", "bird", "cat"))
    with pytest.raises(vitral.DataError, match=r"airplane.*do not correspond.*--against-label-map"):
        vitral.evaluate(run, numbered, against=other)
    with pytest.raises(vitral.DataError, match="do not correspond"):
        vitral.evaluate(run, against=other)
    (tmp_path / "map.csv").write_text("blue,0\ngreen,1\nred,2\n")
    with pytest.raises(vitral.DataError, match="do not correspond"):  # numbers of the first model's labels
        vitral.evaluate(run, against=other, label_map=tmp_path / "map.csv")
    vitral.evaluate(run, numbered, against=run)  # the same labels correspond
    with pytest.raises(vitral.ConfigError, match="against_label_map"):
        vitral.evaluate(run, against_label_map=tmp_path / "map.csv")


def test_a_label_map_for_the_second_model_translates_its_predictions(run: Path, tmp_path: Path) -> None:
    loaded = vitral.load(run / "model.safetensors")
    assert loaded.labels == ("blue", "green", "red")
    renamed = Checkpoint(model=loaded.model, preprocess=loaded.preprocess, labels=("azul", "verde", "rojo"))
    (tmp_path / "map.csv").write_text("red,rojo\ngreen,verde\nblue,azul\n")
    against = vitral.evaluate(run, against=renamed, against_label_map=tmp_path / "map.csv").against
    assert against is not None
    assert (against["difference"], against["disagreements"]) == (0.0, 0)


# ---- frozen features ----


def test_features_have_their_own_scores_beside_those_of_the_classifier(run: Path) -> None:
    evaluation = vitral.evaluate(run, knn=5, few_shot=5)
    assert evaluation.knn is not None
    assert evaluation.few_shot is not None
    assert evaluation.knn["top1"] > 0.9
    assert evaluation.knn["top1_low"] < evaluation.knn["top1"] <= evaluation.knn["top1_high"]
    assert len(evaluation.few_shot["seeds"]) == 3
    assert evaluation.few_shot["top1"] == pytest.approx(np.mean(evaluation.few_shot["seeds"]))
    assert evaluation.few_shot["spread"] == pytest.approx(np.std(evaluation.few_shot["seeds"], ddof=1))
    values = json.loads(json.dumps(evaluation.as_dict()))
    classifier = vitral.evaluate(run)
    assert (values["top1"], values["top5"], values["images"]) == (classifier.scores.top1, classifier.scores.top5, 21)
    assert values["loss"] == pytest.approx(classifier.scores.loss, abs=1e-5)
    assert values["knn"]["k"] == 5
    with pytest.raises(vitral.ConfigError, match="temperature"):
        vitral.evaluate(run, knn=5, temperature=True)


def test_a_model_without_a_head_has_features_only(photos: Path) -> None:
    headless = checkpoint(None, num_classes=0)
    with pytest.raises(vitral.ConfigError, match="no classification head.*--knn"):
        vitral.evaluate(headless, photos)
    knn = vitral.evaluate(headless, photos, knn=3).knn
    assert knn is not None
    assert knn["top1"] > 0.6  # the features of any network contain colors


def test_more_shots_than_images(run: Path, photos: Path, tmp_path: Path) -> None:
    with pytest.raises(vitral.ConfigError, match="few_shot must be at most 24.*got 25"):
        vitral.evaluate(run / "model.safetensors", photos, few_shot=25)
    class_folders(tmp_path, {"red": 3, "green": 9, "blue": 9}, size=(16, 16), split="train")
    class_folders(tmp_path, {"red": 2, "green": 2, "blue": 2}, size=(16, 16), split="test")
    evaluation = vitral.evaluate(run / "model.safetensors", tmp_path, few_shot=(5, 5))
    (note,) = evaluation.notes
    assert "red has 3" in note
    assert evaluation.few_shot is not None
    assert "each" not in evaluation.few_shot  # the same number twice is one


# ---- calibration, mistakes, several labels ----


def test_temperature_scaling_improves_an_overconfident_model(run: Path, photos: Path) -> None:
    loaded = vitral.load(run / "model.safetensors")
    with torch.no_grad():
        loaded.model.head.weight.normal_(std=4.0)
    evaluation = vitral.evaluate(loaded, photos / "train", temperature=True)
    assert evaluation.calibration is not None
    assert evaluation.scaled is not None
    assert evaluation.scaled.temperature is not None
    assert evaluation.scaled.temperature > 1.5
    assert evaluation.scaled.error < evaluation.calibration.error


def test_the_worst_mistakes_have_the_highest_probabilities(photos: Path) -> None:
    evaluation = vitral.evaluate(checkpoint(("blue", "green", "red")), photos / "train")
    assert 0 < len(evaluation.mistakes) <= 12
    probabilities = [mistake.probability for mistake in evaluation.mistakes]
    assert probabilities == sorted(probabilities, reverse=True)
    assert all(mistake.label != mistake.prediction for mistake in evaluation.mistakes)


def test_multi_label_data(tmp_path: Path) -> None:
    folder = class_folders(tmp_path / "p", {"red": 12, "green": 12, "blue": 12}, size=(16, 16))
    rows = [f"{path.relative_to(tmp_path)},{path.parent.name}|any" for path in sorted(folder.glob("*/*.png"))]
    (tmp_path / "labels.csv").write_text("image,labels\n" + "\n".join(rows) + "\n")
    vitral.train(tmp_path / "labels.csv", out=tmp_path / "run", **{**TINY, "epochs": 12})
    evaluation = vitral.evaluate(tmp_path / "run")
    assert evaluation.mean_average_precision is not None
    assert evaluation.mean_average_precision > 0.9
    assert evaluation.confusion is None
    probabilities = vitral.Predictor(tmp_path / "run")(folder / "red" / "000.png").probabilities
    assert probabilities.sum() > 1.3  # each label has a probability of its own
    assert vitral.load(tmp_path / "run" / "model.safetensors").multi_label
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["test"]["mean_average_precision"] == pytest.approx(evaluation.mean_average_precision)
    typical = report["test"]["typical"]
    assert [row["prediction"] for row in typical] == ["any", "blue", "green", "red"]
    assert all(row["label"] == f"any, {row['prediction']}" for row in typical[1:])
    assert len(list((tmp_path / "run" / "plots").glob("relevance-typical-*.png"))) == len(typical)
    assert "Relevance for green" in (tmp_path / "run" / "report.html").read_text()


def test_mistakes_of_multi_label_data_are_labels_that_an_image_does_not_have() -> None:
    logits = torch.tensor([[5.0, 2.0, -1.0], [3.0, 4.0, 1.0], [-2.0, -3.0, -1.0], [9.0, 9.0, -9.0], [0.5, -1.0, -1.0]])
    labels = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    items = [Item(f"{number}.jpg", 0, FileSource("x.jpg")) for number in range(len(logits))]
    indices = torch.arange(len(logits))
    outputs = ModelOutputs(items=items, outputs=logits, labels=labels, indices=indices, unreadable=())
    mistakes = summarize(outputs, ("cat", "dog", "cow")).mistakes
    assert [(mistake.key, mistake.label, mistake.prediction) for mistake in mistakes] == [
        ("1.jpg", "cow", "dog"),
        ("0.jpg", "cat", "dog"),
        ("4.jpg", "none", "cat"),
    ]
    assert mistakes[0].probability == pytest.approx(torch.tensor(4.0).sigmoid().item())


@pytest.mark.parametrize("dialect", ["native", "timm", "huggingface", "torchvision"])
def test_checkpoints_of_every_dialect_stay_multi_label(tmp_path: Path, dialect: str) -> None:
    model = small_model(image_size=16)
    multi_label = Checkpoint(model=model, preprocess=default_preprocess(model), multi_label=True)
    vitral.save(multi_label, tmp_path / "x.safetensors", dialect=dialect)
    assert vitral.load(tmp_path / "x.safetensors").multi_label
    assert not vitral.load(tmp_path / "x.safetensors", num_classes=3).multi_label  # a new head


# ---- options ----


def test_the_callers_model_is_not_changed(photos: Path) -> None:
    model = small_model(num_classes=0).train()
    before = {name: tensor.dtype for name, tensor in model.to(torch.bfloat16).state_dict().items()}
    vitral.evaluate(Checkpoint(model=model, preprocess=default_preprocess(model)), photos, knn=3)
    assert model.training
    assert {name: tensor.dtype for name, tensor in model.state_dict().items()} == before


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"few_shot": "5"}, "few_shot"),
        ({"few_shot": [0, 5]}, "few_shot"),
        ({"knn": 2.5}, "knn"),
        ({"knn": True}, "knn"),
        ({"knn": 100_000}, "knn"),
        ({"real": 5}, "real"),
        ({"workers": 5000}, "workers"),
        ({"workers": -1}, "workers"),
        ({"batch_size": 2**63}, "batch_size"),
        ({"batch_size": 0}, "batch_size"),
        ({"precision": "int8"}, "precision"),
    ],
)
def test_impossible_options_are_refused_by_name(run: Path, options: dict[str, Any], name: str) -> None:
    with pytest.raises(vitral.ConfigError, match=name):
        vitral.evaluate(run, **options)


def test_a_changed_weights_file_is_refused(run: Path, photos: Path, tmp_path: Path) -> None:
    """The tensors differ from the checksum in the file's metadata."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(run / "model.safetensors", "pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    tensors["head.weight"] = -tensors["head.weight"]
    save_file(tensors, tmp_path / "negated.safetensors", metadata=metadata)
    for call in (vitral.evaluate, lambda model, data: vitral.Predictor(model)(data)):
        with pytest.raises(vitral.WeightsError, match="SHA-256"):
            call(tmp_path / "negated.safetensors", photos / "test")


def test_the_repr_shows_the_accuracy(run: Path) -> None:
    assert "95% CI" in repr(vitral.evaluate(run))
    assert "frozen features" in repr(vitral.evaluate(run, knn=3))
