"""Run `vitral describe` and `vitral convert` from the command line."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vitral
from tests.cli.typed import typed as run
from tests.conftest import small_model

GOLDEN = Path("tests/parity/golden")


def test_describe_prints_one_page() -> None:
    done = run("describe", str(GOLDEN / "hybrid.npz"))
    assert done.returncode == 0, done.stderr
    for text in (
        "google checkpoint (npz)",
        "sha256",
        "stages 1 x 2",
        "renamed       76",
        "assumed",
        "mean and std 0.5",
    ):
        assert text in done.stdout, text
    assert "Transformer/encoderblock_{0..1}/LayerNorm_0/{scale,bias}: blocks.i.norm1" in done.stdout


def test_describe_prints_json() -> None:
    described = json.loads(run("describe", str(GOLDEN / "token.npz"), "--format", "json").stdout)
    assert described["config"]["width"] == 48
    assert described["config"]["image_size"] == 32
    assert described["preprocess"]["mean"] == [0.5, 0.5, 0.5]
    assert {"unchanged", "renamed", "resized", "initialized", "ignored", "assumed"} <= set(described["report"])
    assert described["report"]["renamed"]["cls"] == "class_token"
    assert len(described["sha256"]) == 64
    assert run("describe", str(GOLDEN / "token.npz"), "--format", "quiet").stdout == "google\n"


def test_describe_at_another_size() -> None:
    done = run("describe", str(GOLDEN / "token.npz"), "--image-size", "48x64", "--format", "json")
    assert list(json.loads(done.stdout)["report"]["resized"]) == ["Transformer/posembed_input/pos_embedding"]


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "not found"), (b"", "is empty"), (b"hello world, hello", "not a checkpoint")]
)
def test_describe_an_invalid_file(content: bytes | None, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "x.pth"
    if content is not None:
        path.write_bytes(content)
    done = run("describe", str(path))
    assert done.returncode == 2
    assert reason in done.stderr
    assert done.stderr.count("\n") == 1
    assert not done.stdout


def test_describe_finds_one_flipped_bit(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    vitral.save(small_model(), path)
    assert run("describe", str(path)).returncode == 0
    content = bytearray(path.read_bytes())
    content[-1000] ^= 1
    path.write_bytes(content)
    done = run("describe", str(path))
    assert done.returncode == 2
    assert "SHA-256" in done.stderr


@pytest.mark.parametrize(
    ("to", "target", "constants"),
    [
        ("native", "x.safetensors", {}),
        ("google", "x.npz", {}),
        ("big_vision", "x.npz", {}),
        ("timm", "x.safetensors", {"activation": "gelu"}),
        ("timm", "folder", {}),
        ("huggingface", "folder", {}),
        ("huggingface", "x.safetensors", {"norm_eps": 1e-12, "activation": "gelu"}),
    ],
)
def test_convert_and_compare(to: str, target: str, constants: dict[str, Any], tmp_path: Path) -> None:
    done = run("convert", str(GOLDEN / "token.npz"), str(tmp_path / target), "--to", to, "--format", "json")
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert result["constants"] == constants
    assert result["difference"] <= (1e-3 if constants else 1e-5)
    assert result["from"] == "google"


@pytest.mark.usefixtures("few_digits")
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_files_predict_and_train(precision: str, tmp_path: Path) -> None:
    vitral.save(small_model(), tmp_path / "x.safetensors")
    source, target = (str(tmp_path / name) for name in ("x.safetensors", "half.safetensors"))
    converted = run("convert", source, target, "--to", "native", "--precision", precision)
    assert converted.returncode == 0, converted.stderr
    assert f"Rounding to {precision} changed them by" in converted.stdout
    assert Path(target).stat().st_size < 0.6 * Path(source).stat().st_size
    image = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    whole, half = (vitral.Predictor(path)(image).probabilities for path in (source, target))
    assert np.abs(whole - half).max() < 1e-2
    assert not np.array_equal(whole, half)
    checkpoint = vitral.load(target)
    vitral.Predictor(checkpoint)(image)
    assert str(checkpoint.model.norm.weight.dtype) == f"torch.{precision}"  # the caller's model is unchanged
    assert run("describe", target).returncode == 0
    words = ["train", "builtin:digits", "--from", target, "--steps", "1", "--batch-size", "8", "--device", "cpu"]
    done = run(*words, "--out", str(tmp_path / "run"), "--format", "quiet")
    assert done.returncode == 0, done.stderr


def test_convert_overwrites_only_with_the_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("convert", str(GOLDEN / "token.npz"), str(tmp_path / "x.safetensors"), "--to", "native")
    (tmp_path / "x.safetensors").write_text("precious")
    refused = run(*words)
    assert refused.returncode == 2
    assert "--overwrite" in refused.stderr
    assert (tmp_path / "x.safetensors").read_text() == "precious"
    assert run(*words, "--overwrite").returncode == 0
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "mine.txt").write_text("kept")
    into = ["convert", words[1], str(folder), "--to", "huggingface"]
    assert run(*into).returncode == 2
    for _ in range(2):
        assert run(*into, "--overwrite").returncode == 0
    monkeypatch.chdir(folder)
    assert run("convert", str(tmp_path / "x.safetensors"), ".", *into[3:], "--overwrite").returncode == 0
    assert {"mine.txt", "config.json", "model.safetensors"} <= {path.name for path in folder.iterdir()}
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_none_is_a_value_of_some_fields(tmp_path: Path) -> None:
    words = ["convert", str(GOLDEN / "token.npz"), str(tmp_path / "x.safetensors"), "--to", "native"]
    done = run(*words, "--set", "pool=none", "class_token=true", "num_classes=0")
    assert done.returncode == 0, done.stderr
    assert vitral.load(tmp_path / "x.safetensors").model.config.pool == "none"


def test_convert_to_a_dialect_that_cannot_store_it(tmp_path: Path) -> None:
    done = run("convert", str(GOLDEN / "token.npz"), str(tmp_path / "x.pth"), "--to", "torchvision")
    assert done.returncode == 2
    assert "activation" in done.stderr
    done = run(
        "convert", str(GOLDEN / "token.npz"), str(tmp_path / "x.pth"), "--to", "torchvision", "--set", "activation=gelu"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--to", "tim"], "tim"),
        (["--to", "timm", "--set", "image_size"], "NAME=VALUE"),
        (["--to", "timm", "--set", "wisdom=3"], "wisdom"),
        (["--to", "native", "--set", "image_size=30"], "image_size"),
        (["--to", "native", "--set", "image_size={[]:1}"], "image_size"),
        (["--to", "native", "--set", "width=" + 30_000 * "-" + "1"], "width"),
        ([], "to"),
    ],
)
def test_convert_with_invalid_options(words: list[str], reason: str, tmp_path: Path) -> None:
    done = run("convert", str(GOLDEN / "token.npz"), str(tmp_path / "x.safetensors"), *words)
    assert done.returncode == 2
    assert reason in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_convert_refuses_a_file_that_does_not_match_its_checksum(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    vitral.save(small_model(), path)
    content = bytearray(path.read_bytes())
    content[-1000] ^= 1
    path.write_bytes(content)
    done = run("convert", str(path), str(tmp_path / "y.safetensors"), "--to", "native")
    assert done.returncode == 2
    assert "SHA-256" in done.stderr
    assert "Copy or download it again." in done.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["x.safetensors"]


def test_convert_prints_the_difference_under_the_constants_of_the_library(tmp_path: Path) -> None:
    vitral.save(small_model(norm_eps=1e-3), tmp_path / "x.safetensors")
    done = run("convert", str(tmp_path / "x.safetensors"), str(tmp_path / "timm"), "--to", "timm")
    assert done.returncode == 0, done.stderr
    assert "with timm's norm_eps=1e-06" in done.stdout
    assert "timm computes with norm_eps=1e-06" in done.stdout
    assert not done.stderr
