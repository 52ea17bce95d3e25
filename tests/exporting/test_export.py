"""Exported files are asked by the programs that they are for, with preprocessing done by hand from what the file says.

Tracing runs the code as users run it, so the exports happen in a process of their own, without the shape checks that
the other tests switch on.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image

import vitral
from tests.cli.typed import typed
from tests.conftest import small_model
from vitral.cli.export import name_of
from vitral.exporting import onnx
from vitral.exporting.exporter import FromPixels, answers_of, compare, describe, export, notes_on, random_pixels
from vitral.weights.checkpoint import Checkpoint, LoadReport

MODELS = """dict(
    token=small_model(representation=12),
    convolutions=small_model(position="sincos-2d", pool="mean", stem=vitral.ConvStem(widths=(8, 8)), patch_size=1),
    hybrid=small_model(stem=vitral.ResNetStem(stages=(1,)), patch_size=1),
    several=small_model(registers=2, pool="map", position="learned-2d", position_at="every-layer"),
    relative=small_model(depth=1, position="relative"),
    axial=small_model(depth=1, position="relative", attention="axial", pool="mean"),
    bit=vitral.create("bit-r50x1", stages=(1, 1, 1, 1), num_classes=5, image_size=32),
)"""
PRELUDE = f"""
import torch, vitral
from pathlib import Path
from tests.conftest import small_model
from vitral.data.transforms import scale_and_shift
from vitral.exporting import onnx
from vitral.exporting.exporter import export
from vitral.weights.checkpoint import Checkpoint
torch.manual_seed(0)
MODELS = {MODELS}
torch.nn.init.normal_(MODELS["bit"].head.weight, std=0.05)
def checkpoint(model):
    size = model.config.image_hw
    preprocess = vitral.Preprocess(size=size, mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))
    labels = tuple(f"label {{number}}" for number in range(model.config.num_classes))
    return Checkpoint(model=model, preprocess=preprocess, labels=labels)
"""


def run(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", PRELUDE + script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    told = run(f"""
folder = Path({str(folder)!r})
with torch.inference_mode():  # somebody has predicted before
    scale_and_shift((0.1, 0.2, 0.3), (0.4, 0.5, 0.6), torch.device("cpu"))
for name, model in MODELS.items():
    vitral.save(checkpoint(model), folder / f"{{name}}.safetensors")
    assert export(checkpoint(model), folder / f"{{name}}.onnx", to="onnx").difference < 1e-5
export(checkpoint(MODELS["bit"]), folder / "bit.pt2", to="pt2")
onnx.LARGEST = 1000
vitral.save(checkpoint(MODELS["token"]), folder / "large.safetensors")
export(checkpoint(MODELS["token"]), folder / "large.onnx", to="onnx")
""")
    assert told == ""
    return folder


@pytest.mark.parametrize("name", ["token", "convolutions", "hybrid", "several", "relative", "axial", "bit", "large"])
def test_onnx_runtime_answers_as_the_network_does(exported: Path, name: str) -> None:
    session = onnxruntime.InferenceSession(exported / f"{name}.onnx", providers=["CPUExecutionProvider"])
    told = json.loads(session.get_modelmeta().custom_metadata_map["vitral"])
    original = vitral.load(exported / f"{name}.safetensors")
    assert tuple(told["labels"]) == original.labels
    assert (exported / f"{name}.onnx.data").is_file() == (name == "large")  # as of networks above 2 GB
    assert session.get_inputs()[0].shape == ["batch", 3, *told["preprocess"]["size"]]
    assert session.get_outputs()[0].shape == ["batch", len(told["labels"])]
    mean, std = (np.float64(told["preprocess"][what])[:, None, None] for what in ("mean", "std"))
    for count in (1, 5):
        pixels = np.random.default_rng(count).integers(0, 256, (count, 3, *told["preprocess"]["size"]), np.uint8)
        with torch.inference_mode():
            expected = original.model(torch.from_numpy((pixels / 255 - mean) / std).float()).numpy()
        assert np.abs(expected).max() > 0.1
        np.testing.assert_allclose(session.run(None, {"images": pixels})[0], expected, atol=1e-4, rtol=1e-5)


def test_torch_answers_as_the_network_does(exported: Path) -> None:
    extra = {"vitral.json": ""}
    program = torch.export.load(exported / "bit.pt2", extra_files=extra)
    told = json.loads(extra["vitral.json"])
    assert told["preprocess"]["std"] == [0.4, 0.5, 0.6]
    original = vitral.load(exported / "bit.safetensors")
    pixels = torch.randint(256, (3, 3, 32, 32), dtype=torch.uint8)
    mean, std = (torch.tensor(told["preprocess"][what])[:, None, None] for what in ("mean", "std"))
    with torch.inference_mode():
        expected = original.model((pixels / 255 - mean) / std)
        torch.testing.assert_close(program.module()(pixels), expected, atol=1e-4, rtol=1e-5)


def test_a_file_that_answers_otherwise_is_not_kept(tmp_path: Path) -> None:
    """ONNX Runtime's own fault with padded pooling, which the guard keeps away: when this fails, the guard can go."""
    told = run(f"""
onnx._guard_padded_pools = lambda graph: None
try:
    export(checkpoint(MODELS["bit"]), Path({str(tmp_path)!r}) / "bit.onnx", to="onnx")
except vitral.VitralError as error:
    print(error)
""")
    assert "does not answer the same" in told
    assert list(tmp_path.iterdir()) == []


def test_what_the_proof_says() -> None:
    checkpoint = Checkpoint(model=small_model(), preprocess=vitral.Preprocess(size=(24, 16), resize="native"))
    network = FromPixels(checkpoint.model, checkpoint.preprocess)
    batches = [random_pixels(checkpoint, count) for count in (1, 3)]
    expected = answers_of(network, batches)

    def same(images: np.ndarray) -> np.ndarray:
        return answers_of(network, [torch.from_numpy(images)])

    def nan_for_several(images: np.ndarray) -> np.ndarray:
        return same(images) * (np.nan if len(images) > 1 else 1)

    assert expected.shape == (4, 7)
    assert compare(same, batches, expected) == 0
    for wrong in (nan_for_several, lambda images: same(images) + 0.01):
        with pytest.raises(vitral.VitralError, match="does not answer the same"):
            compare(wrong, batches, expected)
    taken = "The network takes pictures of any size, and this file only those of 24 x 16."
    assert [*notes_on(checkpoint, expected)] == [taken]
    assert "the head is not trained" in next(notes_on(checkpoint, expected[:1]))
    guessed = replace(
        checkpoint, report=LoadReport(source="x", dialect="google", format="npz", assumed=("preprocessing: as usual",))
    )
    assert next(notes_on(guessed, expected)) == "assumed: preprocessing: as usual"
    assert describe(guessed)["assumed"] == ["preprocessing: as usual"]
    torch.nn.init.constant_(checkpoint.model.head.weight, torch.inf)  # type: ignore[arg-type]
    with pytest.raises(vitral.WeightsError, match="no finite numbers"):
        answers_of(network, batches)


def test_faults_of_the_exporter_are_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "old.onnx").write_bytes(b"mine")

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no such thing\nand a long story")

    monkeypatch.setattr(torch.export, "export", fail)
    with pytest.raises(vitral.VitralError, match="could not be exported to onnx: no such thing[.]$"):
        export(small_model(), tmp_path / "old.onnx", to="onnx", overwrite=True)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"mine"]


def test_the_command(exported: Path, tmp_path: Path) -> None:
    out = tmp_path / "bit.onnx"
    out.write_bytes(b"old")
    words = ["export", str(exported / "bit.safetensors"), "--to", "onnx", "--out", str(out), "--overwrite"]
    words += ["--image-size", "32", "--format", "json"]
    done = subprocess.run([sys.executable, "-m", "vitral", *words], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["bytes"] == out.stat().st_size
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    shown = json.loads(
        typed("predict", str(exported / "bit.safetensors"), str(tmp_path / "photo.png"), "--format", "json").stdout
    )
    session = onnxruntime.InferenceSession(out, providers=["CPUExecutionProvider"])
    logits = session.run(None, {"images": pixels.transpose(2, 0, 1)[None]})[0][0]
    probabilities = np.exp(logits) / np.exp(logits).sum()
    assert shown["label"] == f"label {probabilities.argmax()}"
    assert shown["probability"] == pytest.approx(probabilities.max(), abs=1e-4)


def test_wrong_use_is_told_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    checkpoint = Checkpoint(model=model, preprocess=vitral.Preprocess(size=(16, 16)))
    there = tmp_path / "there.onnx"
    there.write_bytes(b"mine")
    (tmp_path / "link.onnx").symlink_to(tmp_path / "nowhere")
    (tmp_path / "large.onnx.data").write_bytes(b"numbers")
    for path, to, words in [
        (there, "onnx", "--overwrite"),
        (tmp_path / "x.pt", "onnx", "ends in .onnx"),
        (tmp_path, "onnx", "is a folder"),
        (tmp_path / "link.onnx", "onnx", "--overwrite"),
        (tmp_path / "large.onnx", "onnx", r"large.onnx.data exists"),
        (5, "onnx", "this is 5"),
        (tmp_path / "none" / "x.onnx", "onnx", "there is no folder"),
        (tmp_path / "x.onnx", "onxx", "Did you mean 'onnx'?"),
    ]:
        with pytest.raises(vitral.VitralError, match=words):
            export(checkpoint, path, to=to)
    assert there.read_bytes() == b"mine"
    (tmp_path / "blob").write_bytes(b"")
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blob")
    assert name_of(str(tmp_path / "model.safetensors")) == "model"
    monkeypatch.setattr(onnx, "find_spec", lambda package: None)
    with pytest.raises(vitral.VitralError, match=r"needs onnxscript.*pip install 'vitral\[fast\]'"):
        export(checkpoint, tmp_path / "x.onnx", to="onnx")
    done = typed("export", str(tmp_path / "nothing"), "--to", "pt2")
    assert done.returncode == 2
    assert str(tmp_path / "nothing") in done.stderr
