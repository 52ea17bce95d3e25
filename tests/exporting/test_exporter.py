"""Exported files run in the runtimes that they are for, with preprocessing by hand from the file's metadata."""

import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image

import vitral
from tests.cli.typed import typed
from tests.conftest import small_model
from vitral.api import _name_of as name_of
from vitral.data.transforms import scale_and_shift
from vitral.exporting.exporter import (
    compare,
    compute_outputs,
    export,
    export_notes,
    file_metadata,
    random_images,
)
from vitral.inference.engines import onnx_graph as onnx
from vitral.inference.engines.graph import PixelModel
from vitral.inference.engines.openvino import compile_model
from vitral.model.bit import BiT
from vitral.model.config import Pool, Position, PositionAt
from vitral.model.network import Network
from vitral.weights.checkpoint import Checkpoint, LoadReport


def build_models() -> dict[str, Network]:
    """Build models with every pool, position, stem and kind of attention.

    "large" stores its weights beside the file, as models above 2 GB do. The plain network is vit-cifar10, which
    docs/how-to/export.md exports.
    """
    models: dict[str, Network] = dict(
        convolutions=small_model(
            depth=1, position="sincos-2d", pool="mean", stem=vitral.ConvStem(widths=(8, 8)), patch_size=1
        ),
        hybrid=small_model(
            depth=1, position="relative", stem=vitral.ResNetStem(stages=(1,)), patch_size=1, representation=12
        ),
        axial=small_model(depth=1, position="relative", attention="axial", pool="mean"),
        bit=small_bit(),
        large=small_model(registers=2, pool="map", position="learned-2d", position_at="every-layer"),
        joint=small_model(depth=2, pool="token+mean", position="learned", position_at="every-layer-shared"),
        tokens=small_model(depth=1, pool="none", position="none"),
        merging=small_model(depth=2, merge=2),
        lines=small_model(depth=1, position="learned", attention="axial", pool="mean"),
    )
    return models


NAMES = ("convolutions", "hybrid", "axial", "bit", "large", "joint", "tokens", "merging", "lines")


def test_the_models_cover_every_choice() -> None:
    models = build_models()
    assert tuple(models) == NAMES
    configs = [model.config for model in models.values() if isinstance(model, vitral.ViT)]
    assert {config.pool for config in configs} == set(get_args(Pool))
    assert {config.position for config in configs} == set(get_args(Position))
    assert {config.position_at for config in configs} == set(get_args(PositionAt))
    assert {config.attention for config in configs} == {"full", "axial"}
    assert {type(config.stem) for config in configs} == {type(None), vitral.ConvStem, vitral.ResNetStem}


@pytest.mark.parametrize("name", NAMES)
def test_openvino_outputs_equal_the_models(tmp_path: Path, name: str) -> None:
    """The export runs the file and compares it with the model; the second comparison has images of its own."""
    torch.manual_seed(0)
    checkpoint = checkpoint_of(build_models()[name])
    if name == "axial":  # with relative positions
        with pytest.raises(vitral.VitralError, match="No conversion rule found for operations: aten.diagonal"):
            export(checkpoint, tmp_path / "model.xml", to="openvino")
        return
    assert export(checkpoint, tmp_path / "model.xml", to="openvino").difference < 1e-5
    if name != "tokens":  # one output per token, which engines do not return
        images = random_images(checkpoint, 5)
        expected = compute_outputs(PixelModel(checkpoint.model, checkpoint.preprocess).eval(), [images])
        engine = compile_model(tmp_path / "model.xml")
        np.testing.assert_allclose(engine.logits(images.numpy()), expected, atol=1e-4, rtol=1e-5)


def small_bit() -> BiT:
    model = vitral.create("bit-r50x1", stages=(1, 1, 1, 1), num_classes=5, image_size=32)
    assert isinstance(model, BiT)
    torch.nn.init.normal_(model.head.weight, std=0.05)  # type: ignore[arg-type]
    return model


def checkpoint_of(model: Network) -> Checkpoint:
    preprocess = vitral.Preprocess(size=model.config.image_hw, mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))
    labels = tuple(f"label {number}" for number in range(model.config.num_classes))
    return Checkpoint(model=model, preprocess=preprocess, labels=labels)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    torch.manual_seed(0)
    with torch.inference_mode():  # as after a prediction
        scale_and_shift((0.1, 0.2, 0.3), (0.4, 0.5, 0.6), torch.device("cpu"))
    for name, model in build_models().items():
        checkpoint = checkpoint_of(model)
        vitral.save(checkpoint, folder / f"{name}.safetensors")
        with pytest.MonkeyPatch.context() as patch:
            if name == "large":
                patch.setattr(onnx, "MAX_BYTES", 1000)
            assert export(checkpoint, folder / f"{name}.onnx", to="onnx").difference < 1e-5
        if name == "convolutions":
            export(checkpoint, folder / f"{name}.pt2", to="pt2")
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_onnx_runtime_outputs_equal_the_models(exported: Path, name: str) -> None:
    session = onnxruntime.InferenceSession(exported / f"{name}.onnx", providers=["CPUExecutionProvider"])
    metadata = json.loads(session.get_modelmeta().custom_metadata_map["vitral"])
    original = vitral.load(exported / f"{name}.safetensors")
    assert tuple(metadata["labels"]) == original.labels
    assert (exported / f"{name}.onnx.data").is_file() == (name == "large")  # as for models above 2 GB
    assert b"vitral/model/vit.py" not in (exported / f"{name}.onnx").read_bytes()  # no stack traces with local paths
    assert session.get_inputs()[0].shape == ["batch", 3, *metadata["preprocess"]["size"]]
    tokens = [16] if name == "tokens" else []
    assert session.get_outputs()[0].shape == ["batch", *tokens, len(metadata["labels"])]
    mean, std = (np.float64(metadata["preprocess"][name])[:, None, None] for name in ("mean", "std"))
    for count in (1, 5):
        pixels = np.random.default_rng(count).integers(0, 256, (count, 3, *metadata["preprocess"]["size"]), np.uint8)
        with torch.inference_mode():
            expected = original.model(torch.from_numpy((pixels / 255 - mean) / std).float()).numpy()
        assert np.abs(expected).max() > 0.1
        np.testing.assert_allclose(session.run(None, {"images": pixels})[0], expected, atol=1e-4, rtol=1e-5)


def test_torch_outputs_equal_the_models(exported: Path) -> None:
    extra = {"vitral.json": ""}
    program = torch.export.load(exported / "convolutions.pt2", extra_files=extra)
    metadata = json.loads(extra["vitral.json"])
    assert metadata["preprocess"]["std"] == [0.4, 0.5, 0.6]
    original = vitral.load(exported / "convolutions.safetensors")
    pixels = torch.randint(256, (3, 3, 16, 16), dtype=torch.uint8)
    mean, std = (torch.tensor(metadata["preprocess"][name])[:, None, None] for name in ("mean", "std"))
    with torch.inference_mode():
        expected = original.model((pixels / 255 - mean) / std)
        torch.testing.assert_close(program.module()(pixels), expected, atol=1e-4, rtol=1e-5)


def test_a_file_with_other_outputs_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the guard, ONNX Runtime gets padded pooling wrong. When this test fails, delete the guard."""
    model = small_bit()
    model.blocks = torch.nn.ModuleList()  # the root with its pooling remains
    model.norm, model.head = torch.nn.GroupNorm(32, 64), torch.nn.Linear(64, 5)
    export(checkpoint_of(model), tmp_path / "guarded.onnx", to="onnx")
    monkeypatch.setattr(onnx, "_guard_padded_pools", lambda graph: None)
    with pytest.raises(vitral.VitralError, match="outputs differ from the model's"):
        export(checkpoint_of(model), tmp_path / "bit.onnx", to="onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["guarded.onnx"]


def test_outputs_are_compared() -> None:
    checkpoint = Checkpoint(model=small_model(), preprocess=vitral.Preprocess(size=(24, 16), resize="native"))
    network = PixelModel(checkpoint.model, checkpoint.preprocess)
    batches = [random_images(checkpoint, count) for count in (1, 3)]
    expected = compute_outputs(network, batches)

    def same(images: np.ndarray) -> np.ndarray:
        return compute_outputs(network, [torch.from_numpy(images)])

    def nan_for_several(images: np.ndarray) -> np.ndarray:
        return same(images) * (np.nan if len(images) > 1 else 1)

    assert expected.shape == (4, 7)
    assert compare(same, batches, expected) == 0
    for wrong in (nan_for_several, lambda images: same(images) + 0.01):
        with pytest.raises(vitral.VitralError, match="outputs differ from the model's"):
            compare(wrong, batches, expected)
    (note,) = export_notes(checkpoint, expected)
    assert "only takes 24 x 16" in note
    assert "the head is untrained" in next(export_notes(checkpoint, expected[:1]))
    assuming = replace(
        checkpoint, report=LoadReport(source="x", dialect="google", format="npz", assumed=("preprocessing: as usual",))
    )
    assert next(export_notes(assuming, expected)) == "assumed: preprocessing: as usual"
    assert file_metadata(assuming)["assumed"] == ["preprocessing: as usual"]
    torch.nn.init.constant_(checkpoint.model.head.weight, torch.inf)  # type: ignore[arg-type]
    with pytest.raises(vitral.WeightsError, match="NaN or Inf"):
        compute_outputs(network, batches)


def test_errors_of_the_exporter_are_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "old.onnx").write_bytes(b"mine")

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no such thing\nand a long story")

    monkeypatch.setattr(torch.export, "export", fail)
    with pytest.raises(vitral.VitralError, match="Cannot export this model to onnx: no such thing[.]$"):
        export(small_model(), tmp_path / "old.onnx", to="onnx", overwrite=True)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"mine"]


def test_the_command(tmp_path: Path) -> None:
    model, out = str(tmp_path / "model.safetensors"), tmp_path / "model.onnx"
    vitral.save(checkpoint_of(small_model(depth=1)), model)
    out.write_bytes(b"old")
    arguments = ["--to", "onnx", "--out", str(out), "--overwrite", "--image-size", "24", "--format", "json"]
    done = typed("export", model, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["bytes"] == out.stat().st_size
    pixels = np.random.default_rng(0).integers(0, 256, (24, 24, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    photo = str(tmp_path / "photo.png")
    shown = json.loads(typed("predict", model, photo, "--image-size", "24", "--format", "json").stdout)
    session = onnxruntime.InferenceSession(out, providers=["CPUExecutionProvider"])
    logits = session.run(None, {"images": pixels.transpose(2, 0, 1)[None]})[0][0]
    probabilities = np.exp(logits) / np.exp(logits).sum()
    assert shown["label"] == f"label {probabilities.argmax()}"
    assert shown["probability"] == pytest.approx(probabilities.max(), abs=1e-4)


def test_wrong_use_raises_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    checkpoint = Checkpoint(model=model, preprocess=vitral.Preprocess(size=(16, 16)))
    existing = tmp_path / "existing.onnx"
    existing.write_bytes(b"mine")
    (tmp_path / "link.onnx").symlink_to(tmp_path / "nowhere")
    (tmp_path / "large.onnx.data").write_bytes(b"numbers")
    for path, to, facts in [
        (existing, "onnx", "--overwrite"),
        (tmp_path / "x.pt", "onnx", "end in .onnx"),
        (tmp_path, "onnx", "is a folder"),
        (tmp_path / "link.onnx", "onnx", "--overwrite"),
        (tmp_path / "large.onnx", "onnx", r"large.onnx.data already exists"),
        (5, "onnx", "got 5"),
        (tmp_path / "none" / "x.onnx", "onnx", "none does not exist"),
        (tmp_path / "x.onnx", "onxx", "Did you mean 'onnx'?"),
    ]:
        with pytest.raises(vitral.VitralError, match=facts):
            export(checkpoint, path, to=to)
    assert existing.read_bytes() == b"mine"
    (tmp_path / "blob").write_bytes(b"")
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blob")
    assert name_of(str(tmp_path / "model.safetensors")) == "model"
    monkeypatch.setattr(onnx, "find_spec", lambda package: None)
    with pytest.raises(vitral.VitralError, match=r"needs onnxscript.*pip install 'vitral\[fast\]'"):
        export(checkpoint, tmp_path / "x.onnx", to="onnx")
    done = typed("export", str(tmp_path / "nothing"), "--to", "pt2")
    assert done.returncode == 2
    assert str(tmp_path / "nothing") in done.stderr


def test_a_damaged_file_is_not_exported(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    vitral.save(small_model(), path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 0x80
    path.write_bytes(content)
    with pytest.raises(vitral.WeightsError, match="model.safetensors"):
        vitral.export(path, tmp_path / "model.pt2", to="pt2")
    assert not (tmp_path / "model.pt2").exists()
