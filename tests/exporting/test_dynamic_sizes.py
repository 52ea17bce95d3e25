"""Files of `--dynamic-size` compute at each size what the model computes that `vitral.load` loads at this size."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image

import vitral
from tests.cli.typed import typed
from tests.conftest import small_model
from vitral.errors import ConfigError, DataError
from vitral.exporting.exporter import export
from vitral.model.network import Network
from vitral.preprocess import Preprocess
from vitral.weights.checkpoint import Checkpoint

SIZES = ((16, 16), (8, 8), (24, 32), (4, 44), (48, 20))
"""The size of the models, then smaller, larger and non-square ones. A patch has 4 x 4 pixels."""


def build_models() -> dict[str, Network]:
    """Build models with every method of resampling, and every kind of positions and stem that takes any size."""
    two_axes = dict(position="learned-2d", position_at="every-layer", registers=2, pool="map")
    return {
        "corners": small_model(),
        "cubic": small_model(depth=1, position_resample="bicubic", position_grid=(3, 5)),
        "antialias": small_model(depth=1, position_resample="bicubic-antialias", registers=1, image_size=(16, 24)),
        "cubic-corners": small_model(position_resample="bicubic-corners", position_at="every-layer-shared"),
        "two-axes": small_model(position_resample="bicubic-antialias", **two_axes),
        "waves": small_model(depth=1, position="sincos-2d", pool="mean"),
        "waves-of-a-grid": small_model(depth=1, position="sincos-2d", position_grid=(4, 4)),
        "tokens": small_model(depth=1, pool="none", position="none"),
        "single-pixels": small_model(depth=1, patch_size=1, image_size=6, pool="mean"),
        "convolutions": small_model(depth=1, stem=vitral.ConvStem(widths=(8, 8)), patch_size=1),
        "hybrid": small_model(depth=1, stem=vitral.ResNetStem(stages=()), patch_size=1),
    }


NAMES = tuple(build_models())


def checkpoint_of(model: Network, **fields: Any) -> Checkpoint:
    preprocess = Preprocess(size=model.config.image_hw, mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6), **fields)
    labels = tuple(f"label {number}" for number in range(model.config.num_classes))
    return Checkpoint(model=model, preprocess=preprocess, labels=labels)


def pixels_of(size: Sequence[int], count: int = 2) -> np.ndarray:
    return np.random.default_rng(size[0]).integers(0, 256, (count, 3, *size), np.uint8)


def outputs_of(file: Path, pixels: np.ndarray) -> np.ndarray:
    """Return the outputs of a weights file that `vitral.load` loads at the size of the images."""
    checkpoint = vitral.load(file, image_size=(pixels.shape[2], pixels.shape[3]))
    mean, std = (
        np.float64(values)[:, None, None] for values in (checkpoint.preprocess.mean, checkpoint.preprocess.std)
    )
    with torch.inference_mode():
        return checkpoint.model(torch.from_numpy((pixels / 255 - mean) / std).float()).numpy()


@pytest.mark.parametrize("name", NAMES)
def test_an_onnx_file_equals_the_model_at_each_size(tmp_path: Path, name: str) -> None:
    checkpoint = checkpoint_of(build_models()[name])
    weights, path = tmp_path / "model.safetensors", tmp_path / "model.onnx"
    vitral.save(checkpoint, weights)
    exported = export(checkpoint, path, to="onnx", dynamic_size=True)
    assert exported.difference < 1e-5
    assert exported.sizes[0] == checkpoint.preprocess.size
    assert min(exported.sizes) < exported.sizes[0] < max(exported.sizes)
    session: Any = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert session.get_inputs()[0].shape == ["batch", 3, "height", "width"]
    limits = json.loads(session.get_modelmeta().custom_metadata_map["vitral"])["dynamic_size"]
    step = 1 if name == "single-pixels" else 4
    assert limits == {"multiple_of": [step, step], "maximum": [64 * step, 64 * step]}
    for size in ((64, 5), (7, 9)) if step == 1 else (*SIZES, (256, 4)):
        pixels = pixels_of(size)
        expected = outputs_of(weights, pixels)
        assert np.ptp(expected) > 0.1
        np.testing.assert_allclose(session.run(None, {"images": pixels})[0], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["antialias", "two-axes", "waves", "hybrid"])
def test_an_openvino_file_equals_the_model_at_each_size(tmp_path: Path, name: str) -> None:
    checkpoint = checkpoint_of(build_models()[name])
    weights, path = tmp_path / "model.safetensors", tmp_path / "model.xml"
    vitral.save(checkpoint, weights)
    export(checkpoint, path, to="openvino", dynamic_size=True)
    for size in SIZES:
        logits = vitral.Predictor(path, image_size=size).loaded.logits(torch.from_numpy(pixels_of(size)))
        np.testing.assert_allclose(logits, outputs_of(weights, pixels_of(size)), atol=1e-5, rtol=1e-4)


def test_a_bit_takes_any_height_and_width(tmp_path: Path) -> None:
    model = vitral.create("bit-r50x1", stages=(1, 1, 1, 1), num_classes=5, image_size=40)
    torch.nn.init.normal_(model.head.weight, std=0.05)  # type: ignore[arg-type]
    vitral.save(checkpoint_of(model), tmp_path / "model.safetensors")
    exported = vitral.export(tmp_path / "model.safetensors", tmp_path / "bit.onnx", to="onnx", dynamic_size=True)
    assert exported.notes == ("The file takes images of any height and width up to 2048 x 2048 pixels.",)
    for size in ((40, 40), (33, 70), (9, 20)):
        logits = vitral.Predictor(tmp_path / "bit.onnx", image_size=size).loaded.logits(
            torch.from_numpy(pixels_of(size))
        )
        expected = outputs_of(tmp_path / "model.safetensors", pixels_of(size))
        np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=1e-4)


def test_a_pt2_file_equals_the_model_at_each_size(tmp_path: Path) -> None:
    """Such a file needs two patches per side, since torch treats a single one as a constant."""
    checkpoint = checkpoint_of(build_models()["antialias"])
    vitral.save(checkpoint, tmp_path / "model.safetensors")
    export(checkpoint, tmp_path / "model.pt2", to="pt2", dynamic_size=True)
    module = torch.export.load(tmp_path / "model.pt2").module()
    for size in ((16, 24), (8, 8), (24, 44)):
        with torch.inference_mode():
            outputs = module(torch.from_numpy(pixels_of(size))).numpy()
        np.testing.assert_allclose(outputs, outputs_of(tmp_path / "model.safetensors", pixels_of(size)), atol=1e-5)


def test_image_size_sets_the_default_size(tmp_path: Path) -> None:
    """The file resamples the positions of the checkpoint at every size, not those of the default size once more."""
    weights, path = tmp_path / "model.safetensors", tmp_path / "model.onnx"
    vitral.save(checkpoint_of(small_model(depth=1)), weights)
    vitral.export(weights, path, to="onnx", image_size=(144, 24), dynamic_size=True)
    assert vitral.Predictor(path).loaded.sizes.maximum == (288, 256)  # type: ignore[union-attr]
    for size in ((144, 24), *SIZES):
        predictor = vitral.Predictor(path, image_size=None if size == (144, 24) else size)
        assert predictor.loaded.preprocess.size == size
        logits = predictor.loaded.logits(torch.from_numpy(pixels_of(size)))
        np.testing.assert_allclose(logits, outputs_of(weights, pixels_of(size)), atol=1e-5, rtol=1e-4)


def test_images_keep_their_size_with_native(tmp_path: Path) -> None:
    """Images of several sizes share a batch, and their probabilities are those of the model."""
    checkpoint = checkpoint_of(small_model(position="sincos-2d", image_size=40), resize="native")
    vitral.save(checkpoint, tmp_path / "model.safetensors")
    photos = [pixels_of(size, 1)[0].transpose(1, 2, 0) for size in ((40, 40), (12, 32), (40, 40), (8, 4), (12, 32))]
    (tmp_path / "photos").mkdir()
    for number, photo in enumerate(photos):
        Image.fromarray(photo).save(tmp_path / "photos" / f"{number}.png")
    expected = np.stack([row.probabilities for row in vitral.Predictor(tmp_path / "model.safetensors")(photos)])
    for name, to in (("model.onnx", "onnx"), ("model.xml", "openvino")):
        exported = vitral.export(
            tmp_path / "model.safetensors", tmp_path / name, to=to, dynamic_size=True, images=tmp_path / "photos"
        )
        assert exported.images == 1 + 3 + 3 * 2 + len(photos)  # random ones of four sizes, and photos of the first
        predictor = vitral.Predictor(tmp_path / name)
        outputs = np.stack([row.probabilities for row in predictor(photos)])
        np.testing.assert_allclose(outputs, expected, atol=1e-5)
        with pytest.raises(DataError, match=r"bad dimensions: 4 x 400 for the model, but .* up to 256 x 256 pixels"):
            predictor(np.zeros((4, 400, 3), np.uint8))
        logits = predictor.loaded.logits([torch.from_numpy(photo.transpose(2, 0, 1).copy()) for photo in photos])
        np.testing.assert_allclose(logits.softmax(1), expected, atol=1e-5)
        with pytest.raises(ConfigError, match="takes each image at its own size"):
            vitral.Predictor(tmp_path / name, image_size=16)
    vitral.export(tmp_path / "model.safetensors", tmp_path / "fixed.onnx", to="onnx")
    with pytest.raises(DataError, match="bad dimensions: 12 x 32 for the model, but .* takes 40 x 40 pixels"):
        vitral.Predictor(tmp_path / "fixed.onnx")(photos[1])


def test_the_command(tmp_path: Path) -> None:
    weights, path = str(tmp_path / "model.safetensors"), str(tmp_path / "model.onnx")
    vitral.save(checkpoint_of(small_model(depth=1)), weights)
    done = typed("export", weights, "--to", "onnx", "--out", path, "--dynamic-size", "--precision", "bfloat16")
    assert (done.returncode, "images of 16x16, 8x8, 28x28, 8x28" in done.stdout) == (0, True), done
    assert "any height and width that are multiples of 4, up to 256 x 256 pixels" in done.stdout
    done = typed("export", weights, "--to", "onnx", "--out", path, "--dynamic-size", "--overwrite")
    assert done.returncode == 0, done
    for number in range(4):
        (tmp_path / "photos" / f"label {number % 2}").mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(pixels_of((24, 32), 4)[number].transpose(1, 2, 0))
        image.save(tmp_path / "photos" / f"label {number % 2}" / f"{number}.png")
    photos = str(tmp_path / "photos")
    words = ("--image-size", "24x32", "--format", "json")
    for command in ("predict", "evaluate"):
        ours, theirs = (typed(command, model, photos, *words) for model in (path, weights))
        assert (ours.returncode, theirs.returncode) == (0, 0), ours.stderr + theirs.stderr
        if command == "evaluate":
            assert json.loads(ours.stdout)["loss"] == pytest.approx(json.loads(theirs.stdout)["loss"], abs=1e-5)
        else:
            rows, expected = (
                [json.loads(row)["probability"] for row in done.stdout.splitlines()] for done in (ours, theirs)
            )
            assert rows == pytest.approx(expected, abs=1e-5)
        for size, fact in (("25", "(got 25 x 25). Use 24 x 24."), ("260", "(got 260 x 260). Use 256 x 256.")):
            refused = typed(command, path, photos, "--image-size", size)
            assert refused.returncode == 2
            assert fact in " ".join(refused.stderr.split())


def test_what_does_not_fit_says_why(tmp_path: Path) -> None:
    plain = checkpoint_of(small_model(depth=1))
    odd = Checkpoint(
        model=small_model(depth=1, stem=vitral.ConvStem(widths=(8, 8)), patch_size=1),
        preprocess=Preprocess(size=(18, 16)),
    )
    for checkpoint, options, fact in (
        (plain, dict(from_bytes=True), "dynamic_size has no effect with from_bytes"),
        (plain, dict(to="openvino", precision="int8"), "int8 is calibrated for one size"),
        (checkpoint_of(small_model(position="relative")), {}, "position='relative', whose offsets"),
        (checkpoint_of(small_model(attention="axial")), {}, "attention='axial', which repeats"),
        (checkpoint_of(small_model(merge=2)), {}, "merge=2, because the size limits"),
        (odd, {}, r"multiple of 4 x 4 \(got 18 x 16\). Pass --image-size 16x16"),
    ):
        arguments: dict[str, Any] = dict(to="onnx") | options
        suffix = ".onnx" if arguments["to"] == "onnx" else ".xml"
        with pytest.raises(ConfigError, match=fact):
            export(checkpoint, tmp_path / f"model{suffix}", dynamic_size=True, **arguments)
    assert not list(tmp_path.iterdir())
    model = small_model(depth=1)
    model.positions[0] = torch.nn.Identity()
    with pytest.raises(ConfigError, match="Identity, a position module from outside"):
        export(checkpoint_of(model), tmp_path / "model.onnx", to="onnx", dynamic_size=True)
