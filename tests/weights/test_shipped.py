"""The shipped model: small, complete, and found by its name from any folder."""

import hashlib
import json
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitral
from tests.cli.typed import typed as run
from vitral.weights.shipped import SHIPPED, shipped_weights

CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.mark.parametrize("name", SHIPPED)
def test_it_is_small_and_complete(name: str) -> None:
    path = shipped_weights(name)
    assert path is not None
    assert path.stat().st_size <= 6.5e6
    loaded = vitral.load(name)
    parameters = list(loaded.model.parameters())
    assert sum(parameter.numel() for parameter in parameters) <= 3_000_000
    assert {parameter.dtype for parameter in parameters} == {torch.bfloat16}
    assert loaded.report is not None
    assert not loaded.report.assumed
    card = path.with_suffix(".md").read_text(encoding="utf-8")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()  # the results in the card belong to this very file
    for words in ("vitral train", "--seed 0", "Top-1", "hours", "License", digest):
        assert words in card, words


def test_an_image_is_predicted_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: None) -> None:
    monkeypatch.chdir(tmp_path)
    pixels = np.random.default_rng(0).integers(0, 256, (375, 500, 3), dtype=np.uint8)
    Image.fromarray(pixels).save("photo.jpg")
    done = run("predict", "vit-cifar10", "photo.jpg", "--top", "10", "--format", "json")
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)
    assert sorted(entry["label"] for entry in row["top"]) == sorted(CIFAR10)
    assert vitral.Predictor("vit-cifar10")("photo.jpg").labels == CIFAR10


@pytest.mark.usefixtures("few_digits")
def test_it_can_be_described_and_started_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: None) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("vit-cifar10", "vit-cifar10/"):  # as a shell completes it
        assert run("describe", name, "--format", "quiet").stdout == "native\n"
    words = ["--from", "vit-cifar10", "--steps", "1", "--batch-size", "8", "--device", "cpu", "--out", "run"]
    done = run("train", "builtin:digits", *words, "--format", "quiet")
    assert done.returncode == 0, done.stderr


def test_a_local_file_takes_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    vitral.save(vitral.create("vit-pico4", num_classes=3), "other.safetensors")
    Path("other.safetensors").rename("vit-cifar10")
    assert vitral.load("vit-cifar10").model.config.num_classes == 3


def test_it_is_not_a_network_name(tmp_path: Path) -> None:
    done = run("train", "builtin:digits", "--model", "vit-cifar10", "--out", str(tmp_path / "run"))
    assert done.returncode == 2
    assert "--from" in done.stderr


def test_a_wrong_suffix_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("convert", "vit-cifar10", "other.npz", "--to", "native")
    assert done.returncode == 2
    assert "vitral: other.npz must end in .safetensors" in done.stderr


def test_a_new_head_is_printed(tmp_path: Path) -> None:
    done = run("convert", "vit-cifar10", str(tmp_path / "x.safetensors"), "--to", "native", "--set", "num_classes=3")
    assert "initialized: head.weight: new head: num_classes=3" in done.stdout


@pytest.mark.parametrize(
    ("name", "hint"),
    [("vit-b16", "a network without weights"), ("ViT-B/16", "vit-b16 is a network"), ("vit-cifar11", "vit-cifar10")],
)
def test_other_names_raise_with_a_hint(name: str, hint: str) -> None:
    with pytest.raises(vitral.WeightsError, match=hint):
        vitral.load(name)
