"""BiT, the paper's CNN baseline, works with the same commands as a ViT."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitral
from tests.cli.typed import typed as run
from tests.data.images import class_folders

SMALL = {"stages": [1, 1, 1, 1]}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a narrow BiT with one unit per stage for two steps."""
    folder = tmp_path_factory.mktemp("bit") / "run"
    data = class_folders(folder.with_name("data"), {"a": 20, "b": 20, "c": 20}, size=(32, 32))
    config = folder.with_name("bit.toml")
    config.write_text("network = {stages = [1, 1, 1, 1], width_factor = 0.5}\n")
    words = ["--model", "bit-r50x1", "--config", str(config), "--steps", "2", "--batch-size", "16", "--device", "cpu"]
    done = run("train", str(data), *words, "--out", str(folder), "--format", "quiet")
    assert done.returncode == 0, done.stderr
    return folder


def test_evaluate_predict_and_features(trained: Path, tmp_path: Path) -> None:
    result = json.loads(run("evaluate", str(trained), "--format", "json").stdout)
    assert result["top1"] == pytest.approx(json.loads((trained / "report.json").read_text())["test"]["top1"])
    assert (trained / "report.html").is_file()
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    shown = run("predict", str(trained), str(tmp_path / "photo.png"), "--format", "json")
    assert shown.returncode == 0, shown.stderr
    row = json.loads(shown.stdout.splitlines()[0])
    direct = vitral.Predictor(trained)(tmp_path / "photo.png")
    assert row["top"][0]["label"] == direct.top(1)[0][0]
    done = run("features", str(trained), str(tmp_path / "photo.png"), "--out", str(tmp_path / "x.npz"))
    assert done.returncode == 0, done.stderr
    assert np.load(tmp_path / "x.npz")["features"].shape == (1, 1024)


def test_convert_to_googles_layout(trained: Path, tmp_path: Path) -> None:
    source, target = str(trained / "model.safetensors"), str(tmp_path / "bit.npz")
    done = run("convert", source, target, "--to", "bit", "--format", "json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["difference"] <= 1e-5
    assert run("describe", target, "--format", "quiet").stdout == "bit\n"


def test_fine_tuning_at_another_size_with_the_hyperrule(trained: Path, tmp_path: Path) -> None:
    tuned = vitral.train(
        trained.with_name("data"),
        from_=trained / "model.safetensors",
        recipe="bit-small",
        image_size=40,
        steps=1,
        batch_size=8,
        device="cpu",
        out=tmp_path / "run",
        progress=False,
    )
    assert tuned.checkpoint().preprocess.size == (40, 40)


def test_record_attention_refuses_a_bit() -> None:
    model = vitral.create("bit-r50x1", **SMALL, num_classes=3, image_size=32)
    with pytest.raises(vitral.ConfigError, match="attention"), vitral.record_attention(model):
        model(torch.randn(1, 3, 32, 32))
