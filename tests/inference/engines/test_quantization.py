"""int8 is calibrated on real images, measured on others, and kept only if it loses little accuracy."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import vitral
from tests.conftest import small_model
from vitral.exporting.exporter import export, random_images
from vitral.inference.engines import quantization
from vitral.inference.engines.graph import PixelModel, trace
from vitral.inference.engines.openvino import convert_program
from vitral.inference.engines.quantization import (
    AccuracyLossError,
    RealImages,
    compare_neighbors,
    layers_by_kind,
    measure_drop,
    quantize,
)
from vitral.preprocess import Preprocess
from vitral.weights.checkpoint import Checkpoint

KINDS: tuple[str, ...] = ("qkv", "attention output", "mlp input", "mlp output", "patches and head")
COUNT = 100


def example() -> tuple[Checkpoint, RealImages]:
    checkpoint = Checkpoint(model=small_model(depth=1), preprocess=Preprocess(size=(16, 16)), labels=tuple("abcdefg"))
    images = random_images(checkpoint, 24).numpy()
    with torch.inference_mode():
        labels = PixelModel(checkpoint.model, checkpoint.preprocess)(torch.from_numpy(images[12:])).argmax(1).numpy()
    return checkpoint, RealImages(calibration=images[:12], compared=images[12:], labels=labels, origin="test images")


def test_the_loss_is_paired_image_by_image() -> None:
    expected = np.eye(4)[[0, 1, 2, 3]]
    outputs = np.eye(4)[[0, 1, 2, 0]]  # the last is wrong now
    drop = measure_drop(outputs, expected, np.array([0, 1, 2, 3]))
    assert (drop.points, drop.images, drop.measure) == (25, 4, "top-1")
    assert drop.low < 0 < drop.high  # of four images, one proves nothing
    assert drop.high - drop.points == pytest.approx(1.96 * 100 * np.sqrt(0.25 * 0.75 / 4))
    swapped = measure_drop(np.eye(4)[[1, 1]], np.eye(4)[[1, 0]], np.array([0, 1]))
    assert swapped.points == -50  # better by chance
    assert measure_drop(outputs, expected, None).points == 25
    assert measure_drop(outputs, expected, None).measure == "agreement with float32"


def test_features_lose_what_a_search_no_longer_finds() -> None:
    generator = np.random.default_rng(0)
    expected = np.repeat(np.eye(8), 2, axis=0) + generator.normal(0, 0.01, (16, 8)) + 5  # eight pairs
    rounded = compare_neighbors(expected + generator.normal(0, 0.01, expected.shape), expected)
    assert (rounded.points, rounded.images, rounded.measure) == (0, 16, "nearest images")
    broken = expected.copy()
    broken[0] = 2 * expected.mean(axis=0) - expected[0]  # the first image looks like the opposite of its partner
    assert compare_neighbors(broken, expected).points == pytest.approx(100 * 2 / 16)  # it and its partner
    assert compare_neighbors(generator.normal(0, 1, expected.shape), expected).points > 50


def test_a_small_model_in_int8(tmp_path: Path) -> None:
    checkpoint, images = example()
    exported = export(checkpoint, tmp_path / "int8.xml", to="openvino", precision="int8", images=images, max_drop=50)
    assert exported.drop is not None
    assert exported.drop.images == 12
    assert exported.origin == "test images"
    assert 0 < exported.difference < 0.5  # int8 rounds
    assert "FakeQuantize" in (tmp_path / "int8.xml").read_text()
    predictor = vitral.Predictor(tmp_path / "int8.xml")
    assert predictor.engine == "openvino int8"
    assert predictor(np.zeros((16, 16, 3), np.uint8)).label in "abcdefg"


def test_every_kind_of_layer_is_found() -> None:
    checkpoint, images = example()
    network = PixelModel(checkpoint.model, checkpoint.preprocess).eval()
    program = trace(network, torch.from_numpy(images.calibration[:3]))
    layers = layers_by_kind(convert_program(program, checkpoint.preprocess, ["logits"]), checkpoint.model.config)
    assert set(layers) == set(KINDS)
    assert {kind: len(names) for kind, names in layers.items()} == dict.fromkeys(KINDS, 1) | {"patches and head": 2}


@pytest.fixture
def costs(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Return how many of a hundred images each kind of layer gets wrong in int8, instead of running NNCF."""
    wrong: dict[str, int] = dict.fromkeys(KINDS, 0)

    def run_nncf(nncf: object, model: object, calibration: object, ignored: Sequence[str]) -> set[str]:
        return set(KINDS) - set(ignored)

    def run_all(quantized: set[str], images: object) -> np.ndarray:
        outputs = np.tile([1.0, 0.0], (COUNT, 1))
        outputs[: sum(wrong[kind] for kind in quantized)] = [0, 1]
        return outputs

    monkeypatch.setattr(quantization, "import_nncf", lambda: None)
    monkeypatch.setattr(quantization, "convert_program", lambda *arguments: None)
    monkeypatch.setattr(quantization, "layers_by_kind", lambda *arguments: {kind: [kind] for kind in KINDS})
    monkeypatch.setattr(quantization, "run_nncf", run_nncf)
    monkeypatch.setattr(quantization, "compile_model", lambda model, precision: SimpleNamespace(logits=model))
    monkeypatch.setattr(quantization, "run_all", run_all)
    return wrong


def quantize_example(**options: Any) -> Any:
    expected = np.tile([1.0, 0.0], (COUNT, 1))
    images = RealImages(calibration=expected, compared=expected, labels=np.zeros(COUNT, int), origin="test")
    nothing: Any = None
    options |= dict(outputs=["features", "logits"], on_stage=lambda stage: None)
    return quantize(nothing, nothing, nothing, images, expected, **options)


def test_everything_is_quantized_if_that_costs_little(costs: dict[str, int]) -> None:
    costs["qkv"] = 1
    chosen = quantize_example(max_drop=1.0)
    assert (chosen.kept, chosen.drop.points) == ((), 1)


def test_the_most_sensitive_kinds_stay_in_float32(costs: dict[str, int]) -> None:
    costs |= {"mlp output": 10, "qkv": 4}
    assert quantize_example(max_drop=5).kept == ("mlp output",)
    assert quantize_example(max_drop=0.5).kept == ("mlp output", "qkv")


def test_int8_is_refused_with_the_numbers(costs: dict[str, int]) -> None:
    costs |= dict.fromkeys(KINDS, 10)
    with pytest.raises(
        AccuracyLossError, match=r"more than 0.5 points \(nothing in float32: \+50\.00 points"
    ) as caught:
        quantize_example(max_drop=0.5)
    assert caught.value.message.count(" lost ") == 1 + len(KINDS) + 2  # each combination once
