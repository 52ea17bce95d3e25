"""predict, features and evaluate in two processes of a real torchrun write the bytes that one process writes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.typed import typed

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "vitral"]
VITRAL = [sys.executable, "-m", "vitral"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def run(*command: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, **more)


@pytest.fixture(scope="module")
def images(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy 55 images, of which two are unreadable."""
    folder = tmp_path_factory.mktemp("shared") / "images"
    shutil.copytree(photos / "red", folder / "red")
    shutil.copytree(photos / "green", folder / "green")
    for file in sorted(folder.glob("*/*"))[:5]:
        file.unlink()
    for file in sorted(folder.glob("*/*"))[7:40:25]:
        file.write_bytes(file.read_bytes()[:60])
    return folder


def test_predict(model: str, images: Path, tmp_path: Path) -> None:
    one, two, partial = (tmp_path / f"{name}.jsonl" for name in ("one", "two", "partial"))
    words = ["predict", model, str(images), "--batch-size", "8", "--format", "quiet"]
    assert typed(*words, "--out", str(one)).returncode == 3  # two images are unreadable
    result = run(*TORCHRUN, *words, "--out", str(two))
    assert result.returncode == 1, result.stderr  # torchrun has one code for every failure
    assert "exitcode  : 3" in result.stderr
    assert one.read_bytes() == two.read_bytes()
    # Two processes continue an interrupted file of one, from the middle of a batch on.
    lines = one.read_bytes().splitlines(keepends=True)
    partial.write_bytes(b"".join(lines[:21]) + lines[21][:9])
    result = run(*VITRAL, *words, "--out", str(partial), "--resume", "--processes", "2")
    assert result.returncode == 3, result.stderr
    assert partial.read_bytes() == one.read_bytes()


def test_features(model: str, images: Path, tmp_path: Path) -> None:
    words = ["features", model, str(images), "--batch-size", "8", "--format", "json", "--out"]
    one, two = typed(*words, str(tmp_path / "one.npz")), run(*TORCHRUN, *words, str(tmp_path / "two.npz"))
    assert one.returncode == 3
    assert "exitcode  : 3" in two.stderr
    assert (tmp_path / "one.npz").read_bytes() == (tmp_path / "two.npz").read_bytes()
    facts = [json.loads(result.stdout) | {"file": ""} for result in (one, two)]
    assert facts[0] == facts[1]
    assert (facts[0]["images"], facts[0]["failed"]) == (53, 2)


def check_evaluate(model: str, images: Path, *measure: str) -> None:
    words = ["evaluate", model, str(images), "--batch-size", "8", "--format", "json", *measure]
    one, two = typed(*words), run(*VITRAL, *words, "--processes", "2")
    assert one.returncode == two.returncode, two.stderr
    scores = [json.loads(result.stdout) for result in (one, two)]
    for each in scores:
        each.pop("images_per_second", None)
    assert scores[0] == scores[1]


def test_evaluate(model: str, images: Path) -> None:
    check_evaluate(model, images, "--knn", "3", "--no-cache")  # the features, and the head on them


@pytest.mark.soak
@pytest.mark.parametrize("measure", [(), ("--few-shot", "2"), ("--knn", "3")])
def test_evaluate_in_other_ways(model: str, images: Path, measure: tuple[str, ...]) -> None:
    check_evaluate(model, images, *measure)


@pytest.mark.soak
def test_predict_prints_in_order_and_reads_standard_input(model: str, images: Path) -> None:
    names = "".join(f"{file}\n" for file in sorted(images.glob("*/*")))
    words = [*VITRAL, "predict", model, "-", "--batch-size", "4", "--format", "json"]
    one, two = run(*words, input=names), run(*words, "--processes", "2", input=names)
    assert (one.returncode, two.returncode) == (3, 3), two.stderr
    assert one.stdout == two.stdout
    assert len(one.stdout.splitlines()) == 55


@pytest.mark.soak
def test_an_error_of_the_first_process_ends_all(model: str, images: Path, tmp_path: Path) -> None:
    existing = tmp_path / "labels.csv"
    existing.write_text("")
    result = run(*VITRAL, "predict", model, str(images), "--out", str(existing), "--processes", "2")
    assert result.returncode == 2
    assert result.stderr.count("already exists") == 1
    assert not existing.read_bytes()
