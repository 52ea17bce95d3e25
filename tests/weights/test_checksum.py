"""Verify the checksum of our own files: always, or once per file."""

import os
from pathlib import Path
from time import perf_counter

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import vitral
from tests.conftest import small_model
from vitral.weights.dialects import native
from vitral.weights.formats.opening import open_tensors
from vitral.weights.load import verify_checksum


def negate_head(path: Path) -> None:
    """Negate the head of a file of ours and keep its metadata, checksum included."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    tensors["head.weight"].neg_()
    save_file(tensors, path, metadata=metadata)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VITRAL_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "x.safetensors"
    vitral.save(small_model(), path)
    return path


def test_a_negated_head_is_refused_where_it_is_verified(file: Path, tmp_path: Path) -> None:
    verify_checksum(file)
    negate_head(file)
    vitral.load(file)
    for call in (
        lambda: verify_checksum(file),
        lambda: vitral.load(file, verify=True),
        lambda: vitral.load(file, verify="once"),
        lambda: vitral.describe(file),
        lambda: vitral.convert(file, tmp_path / "y.safetensors", to="native"),
    ):
        with pytest.raises(vitral.WeightsError, match="SHA-256") as caught:
            call()
        assert caught.value.hint == "Copy or download it again."
    assert not (tmp_path / "y.safetensors").exists()


def test_other_dialects_have_no_checksum(tmp_path: Path) -> None:
    vitral.save(small_model(), tmp_path / "x.safetensors", dialect="timm")
    verify_checksum(tmp_path / "x.safetensors")
    vitral.load({**torch.load(timm_pth(tmp_path), weights_only=True)}, heads=3, verify=True)


def timm_pth(folder: Path) -> Path:
    vitral.save(small_model(), folder / "x.pth", dialect="timm")
    return folder / "x.pth"


def test_once_reads_a_file_again_only_when_it_changes(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    valid = native.has_valid_checksum
    monkeypatch.setattr(native, "has_valid_checksum", lambda opened: calls.append(opened) or valid(opened))
    for _ in range(3):
        vitral.load(file, verify="once")
    assert len(calls) == 1
    vitral.load(file, verify=True)
    assert len(calls) == 2
    os.utime(file, ns=(1, 1))
    vitral.load(file, verify="once")
    assert len(calls) == 3
    negate_head(file)
    for _ in range(2):  # a damaged file is not remembered
        with pytest.raises(vitral.WeightsError):
            vitral.load(file, verify="once")


def test_an_unusable_cache_folder_only_costs_time(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "occupied").write_text("")
    monkeypatch.setenv("VITRAL_CACHE", str(tmp_path / "occupied"))
    vitral.load(file, verify="once")
    negate_head(file)
    with pytest.raises(vitral.WeightsError):
        vitral.load(file, verify="once")


def test_a_remembered_file_costs_less_than_five_percent_of_loading(tmp_path: Path, file: Path) -> None:
    path = tmp_path / "large.safetensors"
    vitral.save(vitral.create("vit-s16", num_classes=10), path)
    vitral.load(path, verify="once")
    opened = open_tensors(path)

    def fastest(call: object) -> float:
        times = []
        for _ in range(5):
            start = perf_counter()
            call()  # type: ignore[operator]
            times.append(perf_counter() - start)
        return min(times)

    loading = fastest(lambda: vitral.load(path))
    assert fastest(lambda: native.verify_file(opened, once=True)) < 0.05 * loading


def test_verify_takes_only_its_three_values(file: Path) -> None:
    with pytest.raises(vitral.ConfigError, match="verify"):
        vitral.load(file, verify="always")  # type: ignore[arg-type]
