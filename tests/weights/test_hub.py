"""Load hf:owner/name from a server on this machine, then from the cache alone."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import vitral
from tests.cli.typed import typed
from tests.conftest import small_model
from tests.loopback_hub import NOBODY, read_files, run_vitral, serve_hub
from vitral.weights.hub import choose_files


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the address of a hub with one repository, team/small, and a list of the requests to it."""
    folder = tmp_path / "repository"
    vitral.save(small_model(), folder, dialect="huggingface", labels=[f"kind {i}" for i in range(7)])
    with serve_hub({"team/small": read_files(folder)}) as served:
        yield served


def describe(name: str, cache: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_vitral("describe", name, "--format", "json", cache=cache, **environment)


def test_a_download_prints_files_size_and_folder_and_the_cache_works_offline(
    hub: tuple[str, list[str]], tmp_path: Path
) -> None:
    endpoint, requests = hub
    cache = tmp_path / "cache"
    first = describe("hf:team/small", cache, HF_ENDPOINT=endpoint)
    assert first.returncode == 0, first.stderr
    (line,) = [line for line in first.stderr.splitlines() if "downloading" in line]
    assert "model.safetensors" in line
    assert "MB" in line
    assert str(cache) in line
    described = json.loads(first.stdout)
    assert described["report"]["dialect"] == "huggingface"
    assert described["labels"][3] == "kind 3"

    again = describe("hf:team/small", cache, HF_ENDPOINT=endpoint)
    assert "downloading" not in again.stderr
    before = len(requests)
    offline = describe("hf:team/small", cache, HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="1")
    assert offline.returncode == 0, offline.stderr
    assert len(requests) == before, "offline means no request"
    unreachable = describe("hf:team/small", cache, HF_ENDPOINT=NOBODY)
    assert unreachable.returncode == 0, unreachable.stderr
    for done in (again, offline, unreachable):
        assert json.loads(done.stdout)["config"] == described["config"]


def test_a_damaged_download_is_removed_and_named(tmp_path: Path) -> None:
    vitral.save(small_model(), tmp_path / "repository", dialect="huggingface")
    files = read_files(tmp_path / "repository")
    weights = files["model.safetensors"]
    swapped = weights[:-1] + bytes([weights[-1] ^ 1])
    with serve_hub({"team/small": files}, sent={"model.safetensors": swapped}) as (endpoint, _):
        done = describe("hf:team/small", tmp_path / "cache", HF_ENDPOINT=endpoint)
    assert done.returncode == 2
    assert "model.safetensors is damaged: its SHA-256 does not match. vitral removed it." in done.stderr
    offline = describe("hf:team/small", tmp_path / "cache", HF_ENDPOINT=NOBODY)
    assert offline.returncode == 2
    assert "hf:team/small is not in the cache, and the hub is unreachable" in offline.stderr


def test_a_new_version_is_announced_and_replaces_the_cached_one(tmp_path: Path) -> None:
    for classes in (3, 4):
        folder = tmp_path / str(classes)
        vitral.save(small_model(num_classes=classes), folder, dialect="huggingface")
        with serve_hub({"team/small": read_files(folder)}) as (endpoint, _):
            done = describe("hf:team/small", tmp_path / "cache", HF_ENDPOINT=endpoint)
        assert "downloading" in done.stderr
        assert json.loads(done.stdout)["config"]["num_classes"] == classes


def test_missing_repositories_are_one_sentence(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    endpoint, _ = hub
    for name, environment, reason in (
        ("hf:team/other", {"HF_ENDPOINT": endpoint}, "no public model team/other"),
        ("hf:team/small", {"HF_HUB_OFFLINE": "1"}, "is not in the cache"),
    ):
        done = describe(name, tmp_path / "empty", **environment)
        assert done.returncode == 2
        assert reason in done.stderr
        assert "Traceback" not in done.stderr
    done = typed("describe", "hf:small")
    assert done.returncode == 2
    assert "expected hf:owner/name" in done.stderr


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(vitral.VitralError, match=r"pip install 'vitral\[hub\]'"):
        vitral.load("hf:team/small")


@pytest.mark.parametrize(
    ("files", "chosen"),
    [
        (["model.safetensors", "pytorch_model.bin", "config.json", "README.md"], ["model.safetensors", "config.json"]),
        (["pytorch_model.bin", "x.npz"], ["pytorch_model.bin"]),
        (["ViT-B_16.npz", "README.md"], ["ViT-B_16.npz"]),
        (
            ["model.safetensors.index.json", "model-1.safetensors", "model-2.safetensors"],
            ["model.safetensors.index.json", "model-1.safetensors", "model-2.safetensors"],
        ),
    ],
)
def test_the_safest_checkpoint_is_chosen(files: list[str], chosen: list[str]) -> None:
    assert list(choose_files("x/y", dict.fromkeys(files, 1))) == chosen


def test_two_checkpoints_are_ambiguous() -> None:
    with pytest.raises(vitral.WeightsError, match="single checkpoint"):
        choose_files("x/y", {"a.npz": 1, "b.npz": 1})
