"""A finished run folder that version 0.1 wrote still works, with the accuracy of its report."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import vitral
from tests.cli.typed import typed as command
from vitral.data.sources import open_dataset

RUN = Path(__file__).parents[1] / "fixtures" / "run-0.1"


def test_evaluate_gives_the_accuracy_of_the_report() -> None:
    report = json.loads((RUN / "report.json").read_text())["held_out"]
    evaluation = vitral.evaluate(RUN)
    assert (evaluation.scores.top1, evaluation.scores.images) == (report["top1"], 1000) == (0.162, 1000)
    assert evaluation.scores.loss == pytest.approx(report["loss"], rel=1e-5)
    assert evaluation.confusion == report["confusion"]
    printed = command("evaluate", str(RUN), "--format", "json")
    assert printed.returncode == 0, printed.stderr
    assert json.loads(printed.stdout)["test"]["top1"] == 0.162


def test_features_of_the_train_split_are_evaluated() -> None:
    evaluation = vitral.evaluate(RUN, few_shot=2, cache=False)
    assert evaluation.few_shot is not None
    assert "test split" in evaluation.split


def test_predict_and_features_take_the_folder(tmp_path: Path) -> None:
    pixels = open_dataset("builtin:digits").splits["test"][0].source.read()
    assert isinstance(pixels, np.ndarray)
    Image.fromarray(pixels[..., 0]).save(tmp_path / "digit.png")
    predicted = command("predict", str(RUN), str(tmp_path / "digit.png"), "--format", "json")
    assert predicted.returncode == 0, predicted.stderr
    prediction = vitral.Predictor(RUN)(tmp_path / "digit.png")
    assert json.loads(predicted.stdout)["label"] == prediction.label
    written = command("features", str(RUN), str(tmp_path / "digit.png"), "--out", str(tmp_path / "x.npz"))
    assert written.returncode == 0, written.stderr
    assert np.load(tmp_path / "x.npz")["features"].shape == (1, 16)
