"""`vitral evaluate`: formats, exit codes, and hostile input."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import vitral
from tests.cli.typed import typed as run
from tests.data.images import class_folders
from vitral.errors import WeightsError


def test_evaluate_in_three_formats(model: str) -> None:
    values = json.loads(run("evaluate", model, "--format", "json").stdout)
    assert values["test"] == {name: values[name] for name in ("top1", "top5", "images", "loss")}
    assert float(run("evaluate", model, "--format", "quiet").stdout) == pytest.approx(values["top1"], abs=1e-4)
    page = run("evaluate", model, "--temperature").stdout
    assert "95% CI" in page
    assert "after temperature scaling" in page
    assert "images/s" in page
    assert "3-nearest-neighbor accuracy" in run("evaluate", model, "--knn", "3").stdout


def test_merging_is_compared_with_the_same_model(model: str) -> None:
    merged = json.loads(run("evaluate", model, "--merge", "2", "--against", model, "--format", "json").stdout)
    plain = json.loads(run("evaluate", model, "--format", "json").stdout)
    assert merged["loss"] != plain["loss"]
    assert merged["against"]["top1"] == plain["top1"]
    done = run("evaluate", model, "--merge", "-1")
    assert done.returncode == 2
    assert "merge must be" in done.stderr
    assert (
        "--merge cannot be combined with --suite"
        in run("evaluate", model, ".", "--suite", "vtab-1k", "--merge", "2").stderr
    )


def test_frozen_features_keep_top1_for_the_classifier(model: str) -> None:
    values = json.loads(run("evaluate", model, "--knn", "3", "--few-shot", "2", "--format", "json").stdout)
    classifier = json.loads(run("evaluate", model, "--format", "json").stdout)
    assert values["test"]["top1"] == values["top1"] == classifier["top1"]
    assert values["test"]["images"] == classifier["images"]
    assert values["knn"]["top1"] > 0.5
    assert values["few_shot"]["top1"] > 0.5
    quiet = run("evaluate", model, "--knn", "3", "--format", "quiet").stdout
    assert float(quiet) == pytest.approx(values["knn"]["top1"], abs=1e-4)


def test_unreadable_images_give_exit_code_3(model: str, tmp_path: Path) -> None:
    data = class_folders(tmp_path / "data", {"red": 4, "green": 4}, size=(16, 16))
    (data / "red" / "002.png").write_bytes(b"not an image")
    done = run("evaluate", model, str(data))
    assert done.returncode == 3
    assert "unreadable: red/002.png" in done.stdout


def test_unreadable_training_images_count_for_neighbors_too(model: str, tmp_path: Path) -> None:
    for split in ("train", "test"):
        class_folders(tmp_path, {"red": 6, "green": 6}, size=(16, 16), split=split)
    (tmp_path / "train" / "red" / "002.png").write_bytes(b"")
    done = run("evaluate", model, str(tmp_path), "--knn", "3")
    assert done.returncode == 3
    assert "train/red/002.png" in done.stdout


def test_neighbors_need_a_train_split(model: str, tmp_path: Path) -> None:
    class_folders(tmp_path, {"red": 3, "green": 3}, size=(16, 16), split="test")
    done = run("evaluate", model, str(tmp_path), "--knn", "3")
    assert done.returncode == 2
    assert "train split" in done.stderr


def test_another_image_size(model: str, photos: Path) -> None:
    large = run("predict", model, str(photos / "red"), "--image-size", "32", "--format", "json")
    small = run("predict", model, str(photos / "red"), "--format", "json")
    assert large.returncode == small.returncode == 0
    assert large.stdout != small.stdout
    values = json.loads(run("evaluate", model, str(photos), "--image-size", "32x16", "--format", "json").stdout)
    assert values["images"] > 0


def test_a_second_model_with_other_labels_is_refused(model: str) -> None:
    done = run("evaluate", model, "--against", "vit-cifar10")
    assert done.returncode == 2
    assert "do not correspond" in done.stderr
    assert "--against-label-map" in done.stderr


@pytest.fixture(scope="module")
def overflowing(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with finite weights and infinite outputs."""
    checkpoint = vitral.load(Path(model) / "model.safetensors")
    with torch.no_grad():
        for parameter in checkpoint.model.parameters():
            parameter.mul_(1e20)
    path = tmp_path_factory.mktemp("weights") / "large.safetensors"
    vitral.save(checkpoint, path)
    return str(path)


@pytest.mark.parametrize(
    "words", ["predict {m} {p}", "evaluate {m} {p}", "evaluate {m} {p} --knn 3", "evaluate {good} {p} --against {m}"]
)
def test_infinite_outputs_are_refused(overflowing: str, model: str, photos: Path, words: str) -> None:
    done = run(*words.format(m=overflowing, p=photos, good=model).split())
    assert done.returncode == 2
    assert "NaN or Inf" in done.stderr


def test_labels_with_half_a_surrogate_pair(photos: Path, tmp_path: Path) -> None:
    vitral.save(vitral.create("vit-pico4", num_classes=2, image_size=16), tmp_path / "m", dialect="huggingface")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    config["id2label"] = {"0": "a\ud800", "1": "b"}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    save_file(load_file(tmp_path / "m" / "model.safetensors"), tmp_path / "m" / "model.safetensors")  # no metadata
    assert vitral.load(tmp_path / "m").labels == ("a\\ud800", "b")
    assert run("predict", str(tmp_path / "m"), str(photos), "--out", str(tmp_path / "rows.jsonl")).returncode == 0
    vitral.save(vitral.load(tmp_path / "m"), tmp_path / "again.safetensors", labels=["\ud800", "b"])
    assert vitral.load(tmp_path / "again.safetensors").labels == ("\\ud800", "b")


def test_labels_that_do_not_fit_the_head_are_damage(model: str, tmp_path: Path) -> None:
    from safetensors import safe_open

    with safe_open(Path(model) / "model.safetensors", "pt") as file:
        metadata, tensors = json.loads(file.metadata()["vitral"]), {n: file.get_tensor(n) for n in file.keys()}  # noqa: SIM118
    for labels in (["red"], [["red"], "green"]):
        save_file(tensors, tmp_path / "x.safetensors", metadata={"vitral": json.dumps({**metadata, "labels": labels})})
        with pytest.raises(WeightsError, match="damaged"):
            vitral.load(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("evaluate MODEL nowhere", "nowhere"),
        ("evaluate MODEL --knn 0", "knn"),
        ("evaluate MODEL --knn 2.5", "--knn"),
        ("evaluate MODEL --knn 100000", "knn"),
        ("evaluate MODEL --few-shot 0", "few_shot"),
        ("evaluate MODEL --few-shot 99999999999", "--few-shot"),
        ("evaluate MODEL --batch-size 0", "batch_size"),
        ("evaluate MODEL --batch-size 9223372036854775808", "batch-size"),
        ("evaluate MODEL --batch-size 9223372036854775807", "batch_size"),
        ("evaluate MODEL --workers 5000", "workers"),
        ("evaluate MODEL --workers -1", "workers"),
        ("evaluate MODEL --steps 3", "--suite"),
        ("evaluate MODEL --against nowhere", "nowhere"),
        ("evaluate MODEL --against-label-map nothing", "against"),
        ("evaluate MODEL --label-map nothing", "nothing"),
        ("evaluate MODEL --real nothing", "nothing"),
        ("evaluate MODEL --image-size 0", "--image-size"),
        ("evaluate MODEL --suite vtab-1k", "--suite"),
        ("evaluate MODEL EMPTY --suite vtab-1k --knn 3", "--knn"),
        ("evaluate EMPTY PHOTOS", "EMPTY"),
    ],
)
def test_wrong_use_is_one_sentence_and_exit_code_2(
    model: str, photos: Path, tmp_path: Path, words: str, reason: str
) -> None:
    for name, value in {"MODEL": model, "PHOTOS": str(photos), "EMPTY": str(tmp_path)}.items():
        words, reason = words.replace(name, value), reason.replace(name, value)
    done = run(*words.split())
    assert done.returncode == 2, done.stderr
    assert reason in done.stderr
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
