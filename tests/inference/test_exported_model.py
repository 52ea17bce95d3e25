"""Exported files predict and evaluate as the model does, start without torch, and are checked before they open."""

import json
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import vitral
from tests.cli.typed import typed
from tests.conftest import small_model
from vitral.errors import ConfigError, WeightsError
from vitral.exporting.exporter import export
from vitral.inference.exported_checks import check_onnx, check_openvino
from vitral.weights.checkpoint import Checkpoint


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    model = small_model(depth=1, num_classes=3)
    preprocess = vitral.Preprocess(size=(16, 16), resize="crop", crop_fraction=0.875)
    checkpoint = Checkpoint(model=model, preprocess=preprocess, labels=("cat", "dog", "fish"))
    vitral.save(checkpoint, folder / "model.safetensors")
    export(checkpoint, folder / "model.onnx", to="onnx")
    export(checkpoint, folder / "model.xml", to="openvino", precision="float16")
    export(checkpoint, folder / "model.pt2", to="pt2")
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from PIL import Image

    folder = tmp_path_factory.mktemp("photos")
    for number in range(6):
        target = folder / ("cat", "dog", "fish")[number % 3] / f"{number}.png"
        target.parent.mkdir(exist_ok=True)
        generator = np.random.default_rng(number)
        small = Image.fromarray(generator.integers(0, 256, (6, 8, 3), np.uint8))
        small.resize((40, 30), Image.Resampling.BICUBIC).save(target)
    return folder


@pytest.mark.parametrize(("name", "tolerance"), [("model.onnx", 5e-3), ("model.xml", 1e-2)])
def test_a_file_predicts_and_evaluates_as_its_model(files: Path, photos: Path, name: str, tolerance: float) -> None:
    """Without torch, pixels differ by up to one level, which moves probabilities of this random network slightly."""
    ours, theirs = vitral.Predictor(files / name), vitral.Predictor(files / "model.safetensors")
    assert ours.labels == theirs.labels
    for first, second in zip(ours(str(photos)), theirs(str(photos)), strict=True):
        np.testing.assert_allclose(first.probabilities, second.probabilities, atol=tolerance)
    evaluated, expected = (vitral.evaluate(files / file, photos) for file in (name, "model.safetensors"))
    assert evaluated.scores.loss == pytest.approx(expected.scores.loss, abs=tolerance)
    assert evaluated.engine == {"model.onnx": "onnxruntime float32", "model.xml": "openvino float16"}[name]
    assert expected.engine == "torch float32"


def test_the_command_does_not_import_torch(files: Path, photos: Path) -> None:
    script = (
        "import sys; from vitral.cli.main import main; import atexit;"
        "atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr)); main(sys.argv[1:])"
    )
    words = ["predict", str(files / "model.onnx"), str(photos), "--format", "json"]
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == "False"
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 6
    assert {row["label"] for row in rows} <= {"cat", "dog", "fish"}


def test_what_a_file_cannot_do_is_refused(files: Path, photos: Path) -> None:
    predictor = vitral.Predictor(files / "model.onnx")
    with pytest.raises(ConfigError, match="outputs logits, not features"):
        list(predictor.features(str(photos)))
    with pytest.raises(ConfigError, match="takes images of 16 x 16"):
        vitral.Predictor(files / "model.onnx", image_size=32)
    with pytest.raises(ConfigError, match="computes in float16"):
        vitral.Predictor(files / "model.xml", precision="float32")
    with pytest.raises(WeightsError, match="does not take"):
        vitral.export(files / "model.onnx", files / "again.onnx", to="onnx")
    for command in (["predict", files / "model.pt2", photos], ["evaluate", files / "model.pt2", photos]):
        done = typed(*map(str, command))
        assert (done.returncode, "can run code" in done.stderr) == (2, True)


# ---- hostile files ----


def write_onnx(path: Path, *, domain: str = "", location: str | None = None, properties: bool = True) -> Path:
    """Write a small ONNX file with the library of ONNX."""
    weights = helper.make_tensor("w", TensorProto.FLOAT, [1], [1.0])
    if location is not None:
        weights.ClearField("float_data")
        weights.data_location = TensorProto.EXTERNAL
        weights.external_data.add(key="location", value=location)
    images = helper.make_tensor_value_info("images", TensorProto.FLOAT, ["batch", 3, 4, 4])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, None)
    inner = helper.make_graph(
        [helper.make_node("Identity", ["w"], ["x"], domain=domain)],
        "inner",
        [],
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, None)],
        initializer=[weights],
    )
    condition = helper.make_tensor("c", TensorProto.BOOL, [], [True])
    nodes = [helper.make_node("If", ["c"], ["logits"], then_branch=inner, else_branch=inner)]
    graph = helper.make_graph(nodes, "outer", [images], [logits], initializer=[condition])
    model = helper.make_model(graph)
    if properties:
        description = {"preprocess": {"size": [4, 4]}, "labels": None, "multi_label": False}
        helper.set_model_props(model, {"vitral": json.dumps(description)})
    path.write_bytes(model.SerializeToString())
    return path


def test_our_reader_of_onnx_finds_nested_graphs(tmp_path: Path) -> None:
    assert check_onnx(write_onnx(tmp_path / "good.onnx"))["labels"] is None
    with pytest.raises(WeightsError, match="custom operator evil::Identity"):
        check_onnx(write_onnx(tmp_path / "custom.onnx", domain="evil"))
    outside = tmp_path / "outside.bin"
    outside.write_bytes(bytes(4))
    folder = tmp_path / "inside"
    folder.mkdir()
    (folder / "link.bin").symlink_to(outside)
    for location in ("../outside.bin", str(outside), "link.bin"):
        with pytest.raises(WeightsError, match="outside its folder"):
            check_onnx(write_onnx(folder / "outside.onnx", location=location))
    with pytest.raises(WeightsError, match="was not found"):
        check_onnx(write_onnx(folder / "missing.onnx", location="w.bin"))
    with pytest.raises(WeightsError, match="does not describe its preprocessing"):
        check_onnx(write_onnx(folder / "plain.onnx", properties=False))


def test_damaged_onnx_files_are_refused(files: Path, tmp_path: Path) -> None:
    content = (files / "model.onnx").read_bytes()
    assert onnx.load_model_from_string(content).graph.node  # the library of ONNX reads it
    path = tmp_path / "damaged.onnx"
    for damaged in (b"", b"not an onnx file", content[: len(content) // 2], b"\xff" * 100):
        path.write_bytes(damaged)
        with pytest.raises(WeightsError):
            check_onnx(path)
    generator = np.random.default_rng(0)
    for _ in range(200):  # never anything but WeightsError
        start = int(generator.integers(0, 4000))
        path.write_bytes(content[:start] + generator.bytes(8) + content[start + 8 :])
        with suppress(WeightsError):
            check_onnx(path)


def test_damaged_openvino_files_are_refused(files: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.xml"
    text = (files / "model.xml").read_text()

    def check(changed: str, problem: str, weights: bytes | None = (files / "model.bin").read_bytes()) -> None:
        path.write_text(changed)
        path.with_suffix(".bin").unlink(missing_ok=True)
        if weights is not None:
            path.with_suffix(".bin").write_bytes(weights)
        with pytest.raises(WeightsError, match=problem):
            check_openvino(path)

    check(text, "model.bin, which was not found", weights=None)
    check(text, "is incomplete", weights=b"short")
    check(text[:1000], "damaged")
    check(text.replace('version="opset1"', 'version="evil"', 1), "custom operator")
    check('<!DOCTYPE net [<!ENTITY a "b">]>' + text, "entities")
    check(text.replace("<vitral ", "<other "), "does not describe")
    shutil.copy(files / "model.bin", path.with_suffix(".bin"))
    path.write_text(text)
    assert check_openvino(path)["labels"] == ["cat", "dog", "fish"]
