"""A model runs in int8 like in any other precision: quantized once, measured, and refused if it loses too much."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import copytree, rmtree
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import vitral
from tests.cli.typed import typed
from tests.conftest import small_model
from tests.data.images import class_folders
from tests.evaluation.conftest import TINY
from vitral.errors import ConfigError, DataError, MissingError
from vitral.inference import int8
from vitral.inference.engines import Gate
from vitral.inference.engines.openvino import convert_program
from vitral.inference.engines.quantization import AccuracyLossError, Quantized, measure_drop
from vitral.weights.checkpoint import Checkpoint

LOOSE = Gate(max_drop=100)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("int8") / "colors"
    return class_folders(folder, {"red": 60, "green": 60, "blue": 60}, size=(20, 16))


@pytest.fixture(scope="session")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("int8-runs") / "run"
    vitral.train(data, out=folder, **{**TINY, "epochs": 4})
    return folder


@pytest.fixture
def quantized(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[float]:
    """Return a list that gets an entry whenever a model is quantized, and start with an empty cache."""
    calls: list[float] = []
    quantize = int8.quantize

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(options["max_drop"])
        return quantize(*arguments, **options)

    monkeypatch.setattr(int8, "quantize", counted)
    monkeypatch.setenv("VITRAL_CACHE", str(tmp_path / "cache"))
    return calls


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch, quantized: list[float]) -> list[float]:
    """Return the same list, but take seconds less: the float32 model stands for the quantized one."""

    def convert(program: Any, preprocess: Any, *rest: Any, outputs: list[str], max_drop: float, **_: Any) -> Quantized:
        quantized.append(max_drop)
        if max_drop < 0:
            raise AccuracyLossError("int8 loses 3 points.", hint="Use bfloat16.")
        drop = measure_drop(np.eye(2), np.eye(2), None)
        return Quantized(model=convert_program(program, preprocess, outputs), drop=drop, kept=("qkv",))

    monkeypatch.setattr(int8, "quantize", convert)
    return quantized


@pytest.fixture
def never(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Fail if a model is quantized."""

    def fail(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("quantized")

    monkeypatch.setattr(int8, "quantize", fail)
    return fail


def entries(cache: Path) -> list[Path]:
    return sorted((cache / "engines").iterdir())


def test_a_run_is_quantized_once(trained: Path, data: Path, quantized: list[float], tmp_path: Path) -> None:
    lines: list[str] = []
    predictor = vitral.Predictor(trained, precision="int8", on_choice=lines.append)
    assert predictor.engine == "openvino int8"
    assert lines[0] == "int8: reading images to calibrate with; quantizing takes a minute or more, once"
    assert "points of top-1 lost" in lines[-1]
    files = sorted(map(str, data.rglob("*.png")))[::20]
    exact = vitral.Predictor(trained, engine="torch", precision="float32")
    ours, theirs = predictor(files), exact(files)
    difference = max(np.abs(a.probabilities - b.probabilities).max() for a, b in zip(ours, theirs, strict=True))
    assert 0 < difference < 0.2  # int8 rounds
    assert {prediction.engine for prediction in ours} == {"openvino int8"}
    (first, *_), (second, *_) = ([row for _, row in p.features(files)] for p in (predictor, exact))
    assert isinstance(first, np.ndarray)
    assert isinstance(second, np.ndarray)
    assert 0 < np.abs(first - second).max() < 0.2 * np.abs(second).max()
    again = vitral.Predictor(trained, precision="int8", engine="openvino", on_choice=lines.append)
    assert lines[-1] == lines[-2]  # and nothing was quantized in between
    assert [row.probabilities.tolist() for row in again(files)] == [row.probabilities.tolist() for row in ours]
    assert quantized == [0.5]
    (entry,) = entries(tmp_path / "cache")
    entry.write_bytes(entry.read_bytes()[:-100])
    vitral.Predictor(trained, precision="int8")  # a damaged entry is written again
    assert len(quantized) == 2
    assert len(entries(tmp_path / "cache")) == 1


def test_other_weights_sizes_images_and_limits_are_quantized_again(
    trained: Path, data: Path, pretended: list[float], tmp_path: Path
) -> None:
    run = copytree(trained, tmp_path / "run")
    checkpoint = vitral.load(run / "model.safetensors")
    with torch.no_grad():
        next(checkpoint.model.parameters()).mul_(1.01)
    vitral.save(checkpoint, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").replace(run / "model.safetensors")
    options: list[dict[str, Any]] = [{}, {"image_size": 24}, {"merge": 1}, {"calibration": data}]
    for number, option in enumerate(options, 1):
        predictor = vitral.Predictor(run, precision="int8", gate=LOOSE, **option)
        assert (predictor.engine, len(pretended)) == ("openvino int8", number), option
        predictor(np.zeros((20, 20, 3), np.uint8))
    vitral.Predictor(trained, precision="int8", gate=LOOSE)
    vitral.Predictor(run, precision="int8", gate=Gate(max_drop=99))
    assert pretended == [100] * 5 + [99]


def test_what_loses_too_much_is_refused_and_remembered(trained: Path, pretended: list[float]) -> None:
    for _ in range(2):
        with pytest.raises(AccuracyLossError, match=r"^int8 loses 3 points\. Use bfloat16\.$"):
            vitral.Predictor(trained, precision="int8", gate=Gate(max_drop=-1))
    assert pretended == [-1]


def test_the_commands(trained: Path, data: Path, tmp_path: Path) -> None:
    words = [str(trained), "--precision", "int8", "--format", "json"]
    evaluated = typed("evaluate", *words)
    assert evaluated.returncode == 0, evaluated.stderr
    result = json.loads(evaluated.stdout)
    assert result["engine"] == "openvino int8"
    assert any("points of top-1 lost" in note for note in result["notes"])
    assert abs(result["top1"] - json.loads(typed("evaluate", str(trained), "--format", "json").stdout)["top1"]) < 0.2
    refused = typed("evaluate", *words, "--engine", "torch")
    assert (refused.returncode, "does not compute int8" in refused.stderr) == (2, True)

    out = tmp_path / "labels.csv"
    photos = [str(data / "red"), "--out", str(out)]
    plain = typed("predict", str(trained), *photos, "--format", "quiet")
    assert plain.returncode == 0, plain.stderr
    exact = out.read_text().splitlines()
    out.write_text("\n".join(exact[:30]) + "\n")
    resumed = typed("predict", *words[:3], *photos, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert out.read_text().splitlines()[:30] == exact[:30]
    assert len(out.read_text().splitlines()) == len(exact)
    assert "openvino int8" in resumed.stderr

    features = typed("features", *words[:3], str(data), "--out", str(tmp_path / "f.npz"), "--format", "json")
    assert features.returncode == 0, features.stderr
    assert json.loads(features.stdout)["engine"] == "openvino int8"


def test_a_model_without_a_head_is_calibrated_on_the_images(data: Path, quantized: list[float], tmp_path: Path) -> None:
    model = small_model(depth=1, num_classes=0)
    checkpoint = Checkpoint(model=model, preprocess=vitral.Preprocess(size=(16, 16)))
    vitral.save(checkpoint, tmp_path / "bare.safetensors")
    words = ["features", str(tmp_path / "bare.safetensors"), str(data), "--precision", "int8"]
    for name in ("first.npz", "second.npz"):
        done = typed(*words, "--out", str(tmp_path / name))
        assert done.returncode == 0, done.stderr
        assert "points of nearest images lost" in done.stderr
    assert quantized == [0.5]
    rows = np.load(tmp_path / "second.npz")["features"]
    exact = np.stack([row for _, row in vitral.Predictor(checkpoint, precision="float32").features(str(data))])  # type: ignore[misc]
    assert 0 < np.abs(rows - exact).max() < 0.1 * np.abs(exact).max()


# ---- what is not possible ----


def test_images_are_needed(trained: Path, data: Path, tmp_path: Path, never: object) -> None:
    with pytest.raises(
        ConfigError, match=r"needs images to calibrate with.*Pass a folder to `predict`.*calibration=FOLDER"
    ):
        vitral.Predictor(trained / "model.safetensors", precision="int8")
    few = class_folders(tmp_path / "few", {"red": 3}, size=(20, 16))
    for folder in (few, few / "red"):
        with pytest.raises(ConfigError, match=r"at least 8 images each to calibrate and to compare \(got [01]\)"):
            vitral.Predictor(trained / "model.safetensors", precision="int8", calibration=folder)
    with pytest.raises(DataError, match="missing was not found"):
        vitral.Predictor(trained, precision="int8", calibration=tmp_path / "missing")
    done = typed("predict", str(trained / "model.safetensors"), str(few / "red" / "0.png"), "--precision", "int8")
    assert (done.returncode, "Pass a folder" in done.stderr) == (2, True)


def test_a_run_without_its_dataset(trained: Path, data: Path, tmp_path: Path, pretended: list[float]) -> None:
    copied, folder = copytree(data, tmp_path / "copied"), copytree(trained, tmp_path / "run")
    config = folder / "config.toml"
    config.write_text(config.read_text().replace(str(data), str(copied)))
    vitral.Predictor(folder, precision="int8", gate=LOOSE)
    rmtree(copied)
    assert vitral.Predictor(folder, precision="int8", gate=LOOSE).engine == "openvino int8"  # from the cache
    with pytest.raises(ConfigError, match=r"its dataset changed\. Export it once"):
        vitral.Predictor(folder, precision="int8")
    assert pretended == [100]


def test_models_that_cannot_be_quantized(data: Path, never: object) -> None:
    preprocess = vitral.Preprocess(size=(16, 16))
    native = Checkpoint(model=small_model(depth=1), preprocess=replace(preprocess, resize="native"))
    with pytest.raises(ConfigError, match="int8 is not possible, because the model takes images of mixed sizes"):
        vitral.Predictor(native, precision="int8", calibration=data)
    tokens = Checkpoint(model=small_model(depth=1, pool="none", num_classes=0), preprocess=preprocess)
    with pytest.raises(ConfigError, match="int8 is not possible, because the model outputs one vector per token"):
        vitral.Predictor(tokens, precision="int8", calibration=data)


@pytest.mark.parametrize("package", ["openvino", "nncf"])
def test_missing_packages_are_named(
    package: str, trained: Path, never: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VITRAL_CACHE", str(tmp_path))
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingError, match=rf"needs {package}, which is not installed.*vitral\[fast\]"):
        vitral.Predictor(trained, precision="int8")


def test_several_processes_do_not_quantize(
    trained: Path, monkeypatch: pytest.MonkeyPatch, quantized: list[float]
) -> None:
    world = monkeypatch.setattr(int8, "current_world", lambda: SimpleNamespace(size=2))
    with pytest.raises(ConfigError, match="Several processes cannot quantize a model"):
        vitral.Predictor(trained, precision="int8")
    assert (world, quantized) == (None, [])


def test_training_does_not_offer_int8(data: Path) -> None:
    with pytest.raises(ConfigError, match="precision"):
        vitral.train(data, precision="int8", progress=False)
